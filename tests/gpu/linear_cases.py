"""Inputs and float64 arithmetic of QuantizedLinear and RoutedExperts, for tests of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from dspark_trt.plugins.numerics import FP4_BLOCK, act_quant, decode_e4m3, decode_e8m0, decode_fp4, expand_block_scale
from torch import Tensor

DEVICE = torch.device("cuda")
LIMIT = 10.0


class Draw:
    """Random tensors of one seed."""

    def __init__(self, seed: int, activation: torch.dtype = torch.bfloat16):
        self.activation = activation
        self.options: dict[str, Any] = {"generator": torch.Generator(DEVICE).manual_seed(seed), "device": DEVICE}

    def rows(self, *shape: int) -> Tensor:
        """Activations with channels and groups of very different size."""
        spread = torch.randn(shape[-1], **self.options).mul(0.8).exp()
        return (torch.randn(*shape, **self.options) * spread).to(self.activation)

    def codes(self, *shape: int, fp8: bool = False) -> Tensor:
        """Any byte, without the two NaN codes of e4m3."""
        codes = torch.randint(-128, 128, shape, dtype=torch.int8, **self.options)
        return torch.where((codes & 0x7F) == 0x7F, 3, codes) if fp8 else codes

    def scales(self, *shape: int, around: int = 120) -> Tensor:
        return torch.randint(around - 2, around + 3, shape, **self.options).to(torch.uint8).view(torch.int8)

    def linear(self, rows: int, columns: int, channels: int, block: int) -> list[Tensor]:
        scales = self.scales(-(-columns // block), channels // block)
        return [self.rows(rows, channels), self.codes(columns, channels, fp8=True), scales]

    def choices(self, rows: int, experts: int, top_k: int) -> Tensor:
        return torch.rand(rows, experts, **self.options).argsort(-1)[:, :top_k].int().contiguous()

    def experts(self, rows: int, experts: int, top_k: int, hidden: int, inner: int) -> list[Tensor]:
        """Scales that put most gates within the limit."""
        inputs = [self.rows(rows, hidden), self.choices(rows, experts, top_k), torch.rand(rows, top_k, **self.options)]
        for n, k in ((inner, hidden), (hidden, inner), (inner, hidden)):
            around = 127 - round(0.5 * torch.tensor(9.0 * k).log2().item())
            inputs += [self.codes(experts, n, k // 2), self.scales(experts, n, k // FP4_BLOCK, around=around)]
        return inputs


def exact_product(x: Tensor, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Float64 product of the quantised x and a dequantised weight, and the sums of its terms' magnitudes."""
    codes, scale = act_quant(x, group)
    rounded = (codes.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2).double()
    return rounded @ weight.T, rounded.abs() @ weight.abs().T


def dense_weight(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    wide = expand_block_scale(decode_e8m0(scale).double(), (block, block), (weight.shape[0], weight.shape[1]))
    return decode_e4m3(weight).double() * wide


def check_linear(inputs: list[Tensor], y: Tensor, block: int) -> None:
    x, weight, scale = inputs
    wanted, magnitude = exact_product(x, dense_weight(weight, scale, block), block)
    # A warp adds up to 128 blocks with an error of 2^-24 each, matrix instructions drop what is below 2^-22 of their
    # largest term; then one rounding to the activation type.
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}[y.dtype]
    bound = 2.0**-17 * magnitude + step / 2 * wanted.abs() + torch.finfo(y.dtype).tiny
    worst = float(((y.double() - wanted).abs() / bound).max())
    assert worst <= 1, f"{worst} bounds"
    if y.dtype is torch.bfloat16:
        other = int((y != wanted.to(y.dtype)).sum())
        assert other <= 3 + 0.01 * y.numel(), f"{other} of {y.numel()}"  # spec section 8.1


def exact_experts(inputs: list[Tensor], group: int, limit: float) -> Tensor:
    """The operation with float64 products; rounding to the activation type where it rounds."""
    x, indices, weights, *packed = inputs

    def product(a: Tensor, which: int, expert: int) -> Tensor:
        codes, scale = packed[2 * which][expert], packed[2 * which + 1][expert]
        weight = decode_fp4(codes).double() * decode_e8m0(scale).double().repeat_interleave(FP4_BLOCK, -1)
        return exact_product(a, weight, group)[0].to(x.dtype).double()

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(packed[0])):
        rows, place = torch.where(indices == expert)
        if len(rows) == 0:
            continue
        gate = product(x[rows], 0, expert).clamp_max(limit)
        up = product(x[rows], 2, expert).clamp(-limit, limit)
        inner = (torch.nn.functional.silu(gate) * up * weights[rows, place].double().unsqueeze(-1)).to(x.dtype)
        total.index_add_(0, rows, product(inner, 1, expert).float())
    return total


def attributes_of(inputs: list[Tensor], group: int = 32, limit: float = LIMIT) -> dict[str, Any]:
    hidden, inner = inputs[0].shape[1], inputs[3].shape[1]
    return {"group": group, "hidden_size": hidden, "intermediate_size": inner, "swiglu_limit": limit}


def check_experts(inputs: list[Tensor], y: Tensor, group: int = 32, limit: float = LIMIT) -> None:
    wanted = exact_experts(inputs, group, limit)
    assert bool(y.isfinite().all())
    difference = (y - wanted).abs() / wanted.square().mean().sqrt()
    # A gate, an inner value or a product on a rounding border may fall on its other side: a step of the activation
    # type, or of FP8, in one of many terms.
    assert float(difference.max()) < 6e-2
    if inputs[0].dtype is torch.float32:
        assert float(difference.amax(-1).median()) < 1e-4
    else:
        assert float((difference == 0).double().mean()) > 0.95
