"""Which part of a model a rank holds."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Mapping:
    """Ranks of a job and what they share.

    Tensor parallelism is the only kind so far, so the tensor-parallel group is the world::

        Mapping(world_size=2, rank=1, tp_size=2).tp_group == (0, 1)

    Raises:
        ValueError: the sizes don't multiply to the world size, or the rank is outside it.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size != self.tp_size:
            raise ValueError(
                f"world_size is {self.world_size}, tp_size {self.tp_size}; expected the same positive number"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, expected 0..{self.world_size - 1}")

    @property
    def tp_rank(self) -> int:
        return self.rank

    @property
    def tp_group(self) -> tuple[int, ...]:
        """Global ranks that hold the other shards of this rank's layers, in order."""
        return tuple(range(self.tp_size))

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: MappingABC[str, Any]) -> Mapping:
        return cls(**values)
