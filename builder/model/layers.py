"""The leaves of both networks: quantised linear layers, norms and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...plugins.numerics import linear, rms_norm
from ...plugins.quantized_linear import QUANTIZED_LINEAR
from .context import BuildContext


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that a checkpoint fills; integer types can't take gradients."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Table(nn.Module):
    """A weight that is used as it is stored: embeddings, heads, gates."""

    def __init__(self, *shape: int, dtype: torch.dtype):
        super().__init__()
        self.weight = frozen(*shape, dtype=dtype)


class RmsNorm(Table):
    """Root-mean-square norm over the last dimension, float32 inside."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Fp8Linear(nn.Module):
    """A linear layer released as FP8 e4m3 with E8M0 block scales; [rows, K] -> [rows, N].

    ``released``: weight and scale hold the released bytes and the activations are quantised.
    ``dequantized``: weight is [N, K] in the activation type.
    """

    def __init__(self, in_features: int, out_features: int, block: int, context: BuildContext):
        super().__init__()
        self.block, self.released = block, context.released
        if self.released:
            self.weight = frozen(out_features, in_features, dtype=torch.int8)
            self.scale = frozen(-(-out_features // block), -(-in_features // block), dtype=torch.int8)
        else:
            self.weight = frozen(out_features, in_features, dtype=context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.released:
            return QUANTIZED_LINEAR(x, self.weight, self.scale, block=self.block)
        return linear(x, self.weight)
