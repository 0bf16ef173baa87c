"""Which part of a model a rank holds."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from typing import Any


class MappingError(ValueError):
    """A job's ranks can't be divided like that."""


@dataclass(frozen=True)
class Mapping:
    """Ranks of a job and what they share. Tensor parallelism is the only kind, so all ranks share every layer.

    Raises:
        MappingError: the sizes don't multiply to the world size, or the rank is outside it.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size != self.tp_size:
            raise MappingError(
                f"world_size is {self.world_size}, tp_size {self.tp_size}; expected the same positive number"
            )
        if not 0 <= self.rank < self.world_size:
            raise MappingError(f"rank is {self.rank}, expected 0..{self.world_size - 1}")

    @property
    def tp_rank(self) -> int:
        return self.rank

    @classmethod
    def from_dict(cls, values: MappingABC[str, Any]) -> Mapping:
        """The mapping of world_size, rank and tp_size. Kinds that are not possible here may be named if they are off.

        Raises:
            MappingError: naming every kind that is on and why it is not possible, and every unknown key.
        """
        own = {key: value for key, value in values.items() if key in ("world_size", "rank", "tp_size")}
        problems = []
        for key in values.keys() - own.keys():
            if key not in _REFUSED:
                problems.append(f"{key} is unknown, expected world_size, rank and tp_size")
            elif values[key]:
                problems.append(f"{key} is {values[key]!r}: {_REFUSED[key]}")
        if problems:
            raise MappingError("; ".join(sorted(problems)))
        return cls(**own)


_REFUSED = {
    "sequence_parallel": "every rank keeps the residual streams of all rows, boundaries mix them in place; use tp_size",
    "mega_moe": "its fused kernel reduces over the ranks itself, and the boundary after it would do so again",
}
"""Kinds of parallelism that other runtimes have, and why they are not possible here."""
