"""Bit-level arithmetic that the operations and the networks share (spec section 3.0).

Matrix products of 16-bit and 8-bit operands are accumulated in float64 on the CPU and rounded once to
float32. Their terms are short enough that the sums are exact or nearly so, which makes a row's result
independent of the other rows of the call: speculative and plain decoding then see the same logits. Functions such as
the sigmoid are evaluated in float64 there for the same reason: in float32, torch's vectorised and scalar code differ in
the last bit, so a result would depend on the element's place in the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
FP4_BLOCK = 32
"""Channels along K that share an E8M0 scale in an FP4 tensor."""
_FP4_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``weight * x / rms(x)`` over the last dimension in float32, rounded once to x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else weight.float() * y).to(x.dtype)


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of float32 x, the same for an element wherever it stands in the tensor."""
    if x.device.type != "cpu" or torch.onnx.is_in_onnx_export():
        return function(x)
    return function(x.double()).float()


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float32; x [..., K], weight [N, K] or batched like x."""
    if x.is_cuda and weight.dim() == 2 and x.dtype == weight.dtype and x.dtype != torch.float32:
        # Without float32 copies of both, which for a vocabulary's head are gigabytes.
        product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return product.unflatten(0, x.shape[:-1])
    wide = x.device.type == "cpu" and x.dtype != torch.float32 and not torch.onnx.is_in_onnx_export()
    dtype = torch.float64 if wide else torch.float32
    return torch.matmul(x.to(dtype), weight.to(dtype).transpose(-1, -2)).float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` accumulated as :func:`matmul` does, rounded once to x's dtype."""
    if torch.onnx.is_in_onnx_export() or x.device.type != "cpu":
        return torch.matmul(x, weight.transpose(-1, -2))
    return matmul(x, weight).to(x.dtype)


def pow2_ceil(x: Tensor) -> Tensor:
    """The smallest power of two >= x, from the float32 bits; x positive and normal."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def act_quant(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension to FP8 e4m3 with one power-of-two scale per ``group`` channels.

    Returns:
        codes, float32 values that e4m3 holds exactly, shaped like x; scales [..., K / group] float32.
    """
    grouped = x.float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scale = pow2_ceil(amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
    codes = (grouped / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).float().flatten(-2), scale


def act_quant_dequant(x: Tensor, group: int) -> Tensor:
    """x rounded through :func:`act_quant`, in x's dtype. Idempotent."""
    codes, scale = act_quant(x, group)
    return (codes.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Float32 values of E8M0 exponent bytes: 2^(byte - 127), 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def decode_e4m3(codes: Tensor) -> Tensor:
    """Float32 values of FP8 e4m3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def decode_fp4(packed: Tensor) -> Tensor:
    """Float32 values of packed FP4 e2m1 bytes [..., K / 2] -> [..., K]; low nibble first."""
    values = torch.tensor(_FP4_CODES + tuple(-v for v in _FP4_CODES), device=packed.device)
    packed = packed.view(torch.uint8).int()
    return values[torch.stack((packed & 15, packed >> 4), -1).flatten(-2)]


def expand_block_scale(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeat [ceil(N / bn), ceil(K / bk)] block scales to one value per element, [N, K]."""
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[0], : shape[1]]


def quantized_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor, *, group: int, block: int) -> Tensor:
    """Product of x, quantised here, and quantised weights, float32 (spec 3.0, FP8 and FP4 GEMM).

    For each block of ``block`` channels along K, in order: acc += partial * s_x * s_w.

    Args:
        x: [n, K] activations.
        weight: [N, K] float32 values of the FP8 or FP4 codes.
        weight_scale: [N, K / block] float32, one scale per row and block.
        group: channels of x that share a scale; a multiple of ``block`` or equal to it.
    """
    codes, scale = act_quant(x, group)
    blocks = weight.shape[-1] // block
    wide = torch.float64 if x.device.type == "cpu" else torch.float32
    a = codes.to(wide).unflatten(-1, (blocks, block)).transpose(0, 1)
    b = weight.to(wide).unflatten(-1, (blocks, block)).permute(1, 2, 0)
    acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for k, partial in enumerate(torch.bmm(a, b).float()):
        acc = acc + partial * scale[:, k * block // group, None] * weight_scale[:, k]
    return acc


def rope_tables(positions: Tensor, rope_dims: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., rope_dims / 2] of the float32 product of position and frequency."""
    exponents = torch.arange(0, rope_dims, 2, dtype=torch.float32, device=positions.device) / rope_dims
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * cos.shape[-1]`` channels of x as adjacent pairs; cos broadcasts to x."""
    rope_dims = 2 * cos.shape[-1]
    nope, rope = x[..., :-rope_dims], x[..., -rope_dims:].float()
    even, odd = rope.unflatten(-1, (-1, 2)).unbind(-1)
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((nope, rotated.to(x.dtype)), -1)


def first_argmax(x: Tensor) -> Tensor:
    """Index of the largest value of the last dimension, int32: the lowest id wins a tie, NaN counts
    as -inf, and a row without any finite or +inf value gives 0."""
    x = torch.where(x.isnan(), -torch.inf, x)
    ids = torch.arange(x.shape[-1], device=x.device)
    best = x == x.amax(-1, keepdim=True)
    return torch.where(best, ids, x.shape[-1] - 1).amin(-1).to(torch.int32)
