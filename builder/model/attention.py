"""Latent attention: projections around one KV head, and the two kinds of attention that use them.

An attention kind takes normalised hidden rows and its cache and returns this rank's partial output and
the updated cache. The projections are the same for all kinds (spec 3.5): a low-rank query, one shared
key / value row, and a grouped low-rank output whose partial sums the next boundary reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...plugins.context_kv_insert import CONTEXT_KV_INSERT
from ...plugins.draft_attention import DRAFT_ATTENTION
from ...plugins.numerics import linear, rms_norm
from ...plugins.target_attention import TARGET_ATTENTION
from ..config import DraftConfig, ModelConfig, TargetConfig, Variant
from .context import BuildContext
from .layers import Fp8Linear, RmsNorm, Table, frozen


class LatentAttention(nn.Module):
    """Projections of a layer: rank-local heads and output groups, replicated latents."""

    def __init__(self, config: ModelConfig, context: BuildContext):
        super().__init__()
        self.config, self.dtype = config, context.dtype
        self.heads = config.num_attention_heads // context.tp_size
        self.groups = config.o_groups // context.tp_size
        block, eps, dim = config.weight_block_size, config.rms_norm_eps, config.head_dim
        self.attn_sink = frozen(self.heads, dtype=torch.float32)
        self.wq_a = Fp8Linear(config.hidden_size, config.q_lora_rank, block, context)
        self.q_norm = RmsNorm(config.q_lora_rank, eps, context.dtype)
        self.wq_b = Fp8Linear(config.q_lora_rank, self.heads * dim, block, context)
        self.wkv = Fp8Linear(config.hidden_size, dim, block, context)
        self.kv_norm = RmsNorm(dim, eps, context.dtype)
        group_width = self.heads * dim // self.groups
        self.wo_a = Table(self.groups * config.o_lora_rank, group_width, dtype=context.dtype)
        self.wo_b = Fp8Linear(self.groups * config.o_lora_rank, config.hidden_size, block, context)
        self.cache_attributes: dict[str, Any] = {
            "rope_dims": config.qk_rope_head_dim,
            "rope_theta": config.rope_theta,
            "quant_width": config.kv_quant_width if context.released else 0,
            "quant_group": config.kv_quant_group,
            "head_dim": dim,
        }

    def query(self, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, heads, D], not yet rotated; V4 normalises each head without a weight."""
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.heads, self.config.head_dim))
        return rms_norm(q, None, self.config.rms_norm_eps) if self.config.variant is Variant.V4 else q

    def key_value(self, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, D], normalised, not yet rotated."""
        return self.kv_norm(self.wkv(x))

    def insert(self, kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> Tensor:
        return CONTEXT_KV_INSERT(kv, positions, slots, ring, **self.cache_attributes)

    def cached(self, kv: Tensor, positions: Tensor) -> Tensor:
        """The entries [rows, D] that :meth:`insert` writes for kv: each row goes to a ring of its own."""
        rows = torch.arange(kv.shape[0], dtype=torch.int32, device=kv.device)
        # A copy as the rings: a kernel writes where they are.
        return self.insert(kv, positions, rows, kv.unsqueeze(1).clone()).squeeze(1)

    def output(self, attended: Tensor) -> Tensor:
        """[rows, heads, D] -> [rows, H], this rank's partial sum. wo_a's input is not quantised."""
        grouped = attended.flatten(1).unflatten(-1, (self.groups, -1)).transpose(0, 1)
        weight = self.wo_a.weight.unflatten(0, (self.groups, -1))
        return self.wo_b(linear(grouped, weight).transpose(0, 1).flatten(1))


class WindowAttention(LatentAttention):
    """The target's causal sliding window over a ring cache."""

    config: TargetConfig

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, H], ring [S, Wr, D] -> partial output [rows, H], updated ring."""
        ring = self.insert(self.key_value(x), positions, slots, ring)
        attended = TARGET_ATTENTION(
            self.query(x),
            positions,
            slots,
            ring,
            self.attn_sink,
            window=self.config.sliding_window,
            **self.cache_attributes,
        )
        return self.output(attended), ring


class DraftBlockAttention(LatentAttention):
    """The draft's attention: every row of a block sees the ring and the whole block."""

    config: DraftConfig

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> Tensor:
        """x [R * rows, H], positions and slots [R], ring [S, W, D] -> partial output [R * rows, H]."""
        block = (-1, self.config.block_rows)
        attended = DRAFT_ATTENTION(
            self.query(x).unflatten(0, block),
            self.key_value(x).unflatten(0, block),
            positions,
            slots,
            ring,
            self.attn_sink,
            **self.cache_attributes,
        )
        return self.output(attended.flatten(0, 1))
