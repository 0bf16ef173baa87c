"""What every module needs to know about the network that it is built into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ConfigError, Numerics


def ignore(name: str, tensor: Tensor) -> None:
    """The probe of a network whose intermediate tensors nobody asked for."""


@dataclass(frozen=True)
class BuildContext:
    """Numerics and sharding of one rank's network.

    ``dtype`` is the activation type; the released mode knows bfloat16 only. Modules hold this rank's
    shard and produce partial sums over ``tp_size`` ranks. ``probe(name, tensor)`` sees every
    intermediate tensor that has a name in ``examples/dump_draft.py``.

    Raises:
        ConfigError: released numerics in another type than bfloat16.
    """

    numerics: Numerics
    dtype: torch.dtype
    tp_size: int = 1
    probe: Callable[[str, Tensor], None] = ignore

    def __post_init__(self) -> None:
        if self.released and self.dtype != torch.bfloat16:
            raise ConfigError(
                f"numerics 'released' computes in bfloat16, not {self.dtype}; pass dtype bfloat16, "
                "or numerics 'dequantized' for another type"
            )

    @property
    def released(self) -> bool:
        return self.numerics is Numerics.RELEASED

    @property
    def probing(self) -> bool:
        """Whether tensors that only a probe sees are worth computing."""
        return self.probe is not ignore
