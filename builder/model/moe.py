"""Mixture of experts: router, routed experts and the shared expert (spec 3.6).

All modules are rank-local in the intermediate dimension, so their outputs are partial sums; the router
is replicated and every rank makes the same choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...plugins.numerics import FP4_BLOCK, linear, matmul, pointwise
from ...plugins.routed_experts import ROUTED_EXPERTS, swiglu
from ..config import ModelConfig
from .context import BuildContext
from .layers import Fp8Linear, frozen


class Gate(nn.Module):
    """Chooses experts and their weights: by score, or in hash-routed layers by token id."""

    def __init__(self, config: ModelConfig, context: BuildContext, *, hashed: bool):
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = frozen(config.n_routed_experts, config.hidden_size, dtype=context.dtype)
        if hashed:
            self.tid2eid = frozen(config.vocab_size, self.top_k, dtype=torch.int32)
        else:
            self.bias = frozen(config.n_routed_experts, dtype=torch.float32)

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, H], [rows] -> expert ids [rows, k] int32, weights [rows, k] float32."""
        scores = pointwise(F.softplus, matmul(x, self.weight)).sqrt()
        if hasattr(self, "tid2eid"):
            indices = self.tid2eid[input_ids.long()].long()
        elif torch.onnx.is_in_onnx_export():
            indices = (scores + self.bias).topk(self.top_k, -1).indices
        else:  # topk leaves ties open; the lowest id wins
            indices = (scores + self.bias).sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(-1, indices)
        if self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return indices.to(torch.int32), weights * self.scaling


class ExpertWeights(nn.Module):
    """One of w1, w2, w3 of all experts: [E, N, K], as FP4 bytes and scales or in the activation type."""

    def __init__(self, experts: int, out_features: int, in_features: int, context: BuildContext):
        super().__init__()
        if context.released:
            self.weight = frozen(experts, out_features, in_features // 2, dtype=torch.int8)
            self.scale = frozen(experts, out_features, in_features // FP4_BLOCK, dtype=torch.int8)
        else:
            self.weight = frozen(experts, out_features, in_features, dtype=context.dtype)


class Experts(nn.Module):
    """The routed experts of one rank: the weighted sum over those that were chosen for each row."""

    def __init__(self, config: ModelConfig, context: BuildContext):
        super().__init__()
        self.config, self.released = config, context.released
        self.inner = config.moe_intermediate_size // context.tp_size
        count, hidden = config.n_routed_experts, config.hidden_size
        self.w1 = ExpertWeights(count, self.inner, hidden, context)
        self.w2 = ExpertWeights(count, hidden, self.inner, context)
        self.w3 = ExpertWeights(count, self.inner, hidden, context)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The rank's partial sum [rows, H] float32.

        Args:
            x: [rows, H] in the activation type.
            indices: [rows, k] int32, the experts of each row, as :class:`Gate` returns them.
            weights: [rows, k] float32, their routing weights.
        """
        if self.released:
            parts = [t for w in (self.w1, self.w2, self.w3) for t in (w.weight, w.scale)]
            return ROUTED_EXPERTS(
                x,
                indices,
                weights,
                *parts,
                group=self.config.weight_block_size,
                hidden_size=self.config.hidden_size,
                intermediate_size=self.inner,
                swiglu_limit=self.config.swiglu_limit,
            )
        # Every expert on every row: static shapes that any runtime takes, at the price of idle work.
        gate, up = linear(x.unsqueeze(0), self.w1.weight), linear(x.unsqueeze(0), self.w3.weight)
        ids = torch.arange(self.config.n_routed_experts, dtype=torch.int32, device=x.device)
        routing = ((indices.unsqueeze(-1) == ids).float() * weights.unsqueeze(-1)).sum(1)
        inner = swiglu(gate, up, self.config.swiglu_limit) * routing.t().unsqueeze(-1)
        return linear(inner.to(x.dtype), self.w2.weight).float().sum(0)


class SharedExpert(nn.Module):
    """The dense expert that every row visits, clamped like the routed ones."""

    def __init__(self, config: ModelConfig, context: BuildContext):
        super().__init__()
        inner, hidden, block = (
            config.moe_intermediate_size // context.tp_size,
            config.hidden_size,
            config.weight_block_size,
        )
        self.limit = config.swiglu_limit
        self.w1 = Fp8Linear(hidden, inner, block, context)
        self.w2 = Fp8Linear(inner, hidden, block, context)
        self.w3 = Fp8Linear(hidden, inner, block, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Routed experts plus shared expert, summed in float32 and rounded once; a partial sum."""

    def __init__(self, config: ModelConfig, context: BuildContext, *, hashed: bool = False):
        super().__init__()
        self.gate = Gate(config, context, hashed=hashed)
        self.experts = Experts(config, context)
        self.shared_experts = SharedExpert(config, context)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """[rows, H], [rows] -> [rows, H]."""
        indices, weights = self.gate(x, input_ids)
        return (self.experts(x, indices, weights) + self.shared_experts(x).float()).to(x.dtype)
