"""Tiny checkpoints turned into models: written in the released format, converted, loaded.

Tests of the networks take their weights through the whole path (file, conversion, rank shard, load), and
oracles read the released tensors beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dspark_trt.builder.checkpoint import convert_checkpoint, load_shard, rank_file_name, read_shard_config
from dspark_trt.builder.config import DraftConfig, Numerics, TargetConfig
from dspark_trt.builder.model.context import BuildContext, ignore
from dspark_trt.builder.model.draft import DraftModel
from dspark_trt.builder.model.target import TargetModel
from torch import Tensor

from tests.released import language_keys, random_tensors, tiny_config, write_checkpoint

VARIANTS = ("v4", "v4.1")


def ids(*values: int) -> Tensor:
    """int32, as every id, position and slot is."""
    return torch.tensor(values, dtype=torch.int32)


def see(name: str, tensor: Tensor) -> None:
    """A probe; with any, a greedy draft too computes its corrected logits."""


@dataclass
class TinyCheckpoint:
    """A released checkpoint on disk, its tensors, and its rank shards, made when first asked for."""

    directory: Path
    variant: str
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    outlier: float = 1.0
    """Factor of one channel of every kv row, so that the channels that share its scale show."""

    def __post_init__(self) -> None:
        root = tiny_config(self.variant, **self.overrides)
        self.keys = language_keys(root)
        norms = {k: t for k, t in random_tensors(root, seed=self.seed).items() if k.endswith("kv_norm.weight")}
        for norm in norms.values():
            norm[3] *= self.outlier
        self.tensors = write_checkpoint(self.directory / "released", root, seed=self.seed, replace=norms)

    def shards(self, tp_size: int = 1) -> Path:
        path = self.directory / f"shards{tp_size}"
        if not path.exists():
            convert_checkpoint(self.directory / "released", path, tp_size=tp_size)
        return path

    @property
    def draft_config(self) -> DraftConfig:
        return read_shard_config(self.shards()).draft

    @property
    def target_config(self) -> TargetConfig:
        target = read_shard_config(self.shards()).target
        assert target is not None
        return target

    def _context(self, dtype: torch.dtype | None, tp_size: int, probe: Callable[[str, Tensor], None]) -> BuildContext:
        if dtype is None:
            return BuildContext(Numerics.RELEASED, torch.bfloat16, tp_size, probe)
        return BuildContext(Numerics.DEQUANTIZED, dtype, tp_size, probe)

    def draft(
        self,
        dtype: torch.dtype | None = torch.float32,
        *,
        tp_size: int = 1,
        rank: int = 0,
        probe: Callable[[str, Tensor], None] = see,
        sampling: bool = False,
    ) -> DraftModel:
        """The draft, dequantised to ``dtype``, or with None in released numerics; it returns its logits."""
        model = DraftModel(self.draft_config, self._context(dtype, tp_size, probe), sampling=sampling)
        load_shard(model, self.shards(tp_size) / rank_file_name(rank), network="draft")
        return model.eval()

    def target(
        self,
        dtype: torch.dtype | None = torch.float32,
        *,
        tp_size: int = 1,
        rank: int = 0,
        probe: Callable[[str, Tensor], None] = ignore,
    ) -> TargetModel:
        """The target, as :meth:`draft`."""
        model = TargetModel(self.target_config, self._context(dtype, tp_size, probe))
        load_shard(model, self.shards(tp_size) / rank_file_name(rank), network="target")
        return model.eval()


def target_rings(model: TargetModel, slots: int, rows: int | None = None) -> list[Tensor]:
    """Rings full of NaN: what a model reads it must have written."""
    config = model.config
    shape = (slots, rows or 2 * config.sliding_window, config.head_dim)
    return [torch.full(shape, torch.nan, dtype=model.context.dtype) for _ in range(config.num_hidden_layers)]


def draft_rings(model: DraftModel, slots: int) -> list[Tensor]:
    """As :func:`target_rings`, for the stages of a draft."""
    config = model.config
    shape = (slots, config.sliding_window, config.head_dim)
    return [torch.full(shape, torch.nan, dtype=model.context.dtype) for _ in range(config.num_stages)]
