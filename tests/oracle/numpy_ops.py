"""The specification's arithmetic once more, in float64 numpy, element by element where that is clearest.

Nothing here comes from the package: formats are decoded from their bit definitions, products are summed in
float64, and a value is rounded exactly where the specification says so, through ``Rounding``. With
:data:`EXACT` no activation is rounded, which is what ``dequantized`` float32 networks approximate.

Arrays are float64 unless a name says otherwise. Rows come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Rounding = Callable[[Array], Array]


def rounder(significand: int, smallest_exponent: int, largest: float, *, saturate: bool = False) -> Rounding:
    """Round to nearest, ties to even, to a binary format.

    Args:
        significand: bits, the hidden one included.
        smallest_exponent: of the smallest normal number; below it the spacing stays.
        largest: finite value; beyond it comes infinity, or with ``saturate`` the largest value.
    """

    def apply(x: Array) -> Array:
        x = np.asarray(x, np.float64)
        exponent = np.maximum(np.frexp(x)[1], smallest_exponent + 1)
        spacing = np.ldexp(1.0, exponent - significand)
        with np.errstate(invalid="ignore"):
            rounded = np.where(np.isfinite(x), np.rint(x / spacing) * spacing, x)
        beyond = largest if saturate else np.inf
        return np.where(np.abs(rounded) > largest, np.copysign(beyond, rounded), rounded)

    return apply


BF16 = rounder(8, -126, float(2**127 * (2 - 2**-7)))
FP16 = rounder(11, -14, 65504.0)
FP32 = rounder(24, -126, float(2**127 * (2 - 2**-23)))
E4M3 = rounder(4, -6, 448.0, saturate=True)


def EXACT(x: Array) -> Array:  # noqa: N802 - a rounding, named as the others
    return np.asarray(x, np.float64)


# Formats ------------------------------------------------------------------------------------------------


def decode_e4m3(codes: Array) -> Array:
    """Sign, four exponent bits with bias 7, three mantissa bits; all ones is NaN."""
    codes = np.asarray(codes).view(np.uint8).astype(np.int64)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    value = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    value = np.where((exponent == 15) & (mantissa == 7), np.nan, value)
    return np.where(sign == 1, -value, value)


def decode_e8m0(codes: Array) -> Array:
    """2^(byte - 127); byte 255 is NaN."""
    codes = np.asarray(codes).view(np.uint8).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def decode_fp4(packed: Array) -> Array:
    """[..., K / 2] bytes -> [..., K]: sign, two exponent bits with bias 1, one mantissa bit; low nibble first."""
    packed = np.asarray(packed).view(np.uint8).astype(np.int64)
    code = np.stack((packed % 16, packed // 16), -1).reshape(*packed.shape[:-1], -1)
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = np.where(exponent > 0, np.ldexp(1 + mantissa / 2, exponent - 1), mantissa / 2)
    return np.where(code >= 8, -value, value)


def spread_blocks(scale: Array, block: int, shape: tuple[int, ...]) -> Array:
    """Block scales [ceil(N / block), ceil(K / block)] -> one per element [N, K]."""
    rows, columns = np.arange(shape[0]) // block, np.arange(shape[1]) // block
    return scale[rows[:, None], columns[None, :]]


def act_quant(x: Array, group: int) -> tuple[Array, Array]:
    """Codes (as values) and power-of-two scales of the last dimension, spec 3.0."""
    grouped = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, group)
    amax = np.maximum(np.abs(grouped).max(-1), float(np.float32(1e-4)))
    t = FP32(amax * float(np.float32(1 / 448)))
    mantissa, exponent = np.frexp(t)
    scale = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    codes = E4M3(np.clip(grouped / scale[..., None], -448, 448))
    return codes.reshape(x.shape), scale


def act_quant_dequant(x: Array, group: int, rounding: Rounding = BF16) -> Array:
    codes, scale = act_quant(x, group)
    return rounding(codes * np.repeat(scale, group, -1))


# Building blocks ----------------------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array | float, eps: float, rounding: Rounding = EXACT) -> Array:
    return rounding(weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def rope_angles(positions: Array, rope_dims: int, theta: float) -> Array:
    """[..., rope_dims / 2]: the float32 product of a position and a float32 frequency (spec 10.6).

    The frequency is the released formula in float32, power included: one bit of it is 0.03 rad a million
    positions away, so a more exact frequency would be another model.
    """
    frequency = 1.0 / theta ** (torch.arange(0, rope_dims, 2, dtype=torch.float32) / rope_dims)
    return (np.asarray(positions, np.float32)[..., None] * frequency.numpy()).astype(np.float64)


def rope(
    x: Array,
    positions: Array,
    rope_dims: int,
    theta: float,
    rounding: Rounding = EXACT,
    *,
    inverse: bool = False,
) -> Array:
    """Multiply adjacent pairs of the last channels, as complex numbers, by exp(+-i angle); positions [...]."""
    turn = np.exp((-1j if inverse else 1j) * rope_angles(positions, rope_dims, theta))
    pairs = x[..., -rope_dims::2] + 1j * x[..., 1 - rope_dims :: 2]
    turned = pairs * turn.reshape(*turn.shape[:-1], *([1] * (x.ndim - turn.ndim)), turn.shape[-1])
    out = np.array(x, np.float64)
    out[..., -rope_dims::2], out[..., 1 - rope_dims :: 2] = rounding(turned.real), rounding(turned.imag)
    return out


def sink_attention(
    q: Array, keys: Array, sink: Array, rounding: Rounding = EXACT, places: Array | None = None
) -> Array:
    """One row: q [heads, D] over valid keys [K, D], which are the values too; sink [heads].

    Blocks of 64 places share a running maximum; ``places`` says where each key lies, in order, when invalid
    ones lie between them.
    """
    out = np.zeros_like(q, np.float64)
    blocks = (np.arange(len(keys)) if places is None else places) // 64
    for head, query in enumerate(q):
        maximum, denominator, total = -1e30, 0.0, np.zeros(q.shape[-1])
        for block in np.unique(blocks):
            part = keys[blocks == block]
            scores = part @ query * float(np.float32(q.shape[-1] ** -0.5))
            new = max(maximum, scores.max())
            p = np.exp(scores - new)
            denominator = denominator * np.exp(maximum - new) + p.sum()
            total = total * np.exp(maximum - new) + rounding(p) @ part
            maximum = new
        if len(keys):
            with np.errstate(over="ignore"):  # a sink far above every score leaves nothing
                out[head] = total / (denominator + np.exp(sink[head] - maximum))
    return rounding(out)


def sinkhorn(logits: Array, eps: float, iterations: int) -> Array:
    """[..., C, C] -> nearly doubly stochastic; the last step is on the columns (sums over the sources)."""
    k = np.exp(logits - logits.max(-1, keepdims=True))
    k = k / k.sum(-1, keepdims=True) + eps
    k = k / (k.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdims=True) + eps)
        k = k / (k.sum(-2, keepdims=True) + eps)
    return k


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def project_streams(streams: Array, fn: Array, rms_eps: float) -> Array:
    """[n, 4, H] -> [n, fn rows]; the mean runs over all 4 H values."""
    out = []
    for row in streams:
        u = np.concatenate([row[i] for i in range(4)])
        out.append((fn @ u) / np.sqrt((u * u).mean() + rms_eps))
    return np.array(out).reshape(len(streams), len(fn))


def coefficients(
    streams: Array, fn: Array, scale: Array, base: Array, *, rms_eps: float, hc_eps: float, iterations: int
) -> tuple[Array, Array, Array]:
    """pre [n, 4], post [n, 4], comb [n, 4 source, 4 target] (spec 3.3)."""
    m = project_streams(streams, fn, rms_eps)
    pre, post, logits = np.zeros((len(m), 4)), np.zeros((len(m), 4)), np.zeros((len(m), 4, 4))
    for i in range(4):
        pre[:, i] = sigmoid(m[:, i] * scale[0] + base[i]) + hc_eps
        post[:, i] = 2 * sigmoid(m[:, 4 + i] * scale[1] + base[4 + i])
        for k in range(4):
            logits[:, i, k] = m[:, 8 + 4 * i + k] * scale[2] + base[8 + 4 * i + k]
    return pre, post, sinkhorn(logits, hc_eps, iterations)


def collapse(streams: Array, pre: Array, rounding: Rounding = EXACT) -> Array:
    total = np.zeros_like(streams[:, 0], np.float64)
    for i in range(4):
        total += pre[:, i, None] * streams[:, i]
    return rounding(total)


def mix(y: Array, streams: Array, post: Array, comb: Array, rounding: Rounding = EXACT) -> Array:
    """Stream k becomes post_k y + sum over the sources j of comb[j, k] stream_j."""
    out = np.zeros_like(streams, np.float64)
    for target in range(4):
        out[:, target] = post[:, target, None] * y
        for source in range(4):
            out[:, target] += comb[:, source, target, None] * streams[:, source]
    return rounding(out)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def route(
    x: Array, weight: Array, bias: Array | None, top_k: int, scaling: float, chosen: Array | None = None
) -> tuple[Array, Array]:
    """Expert ids and weights [n, top_k]; ``chosen`` fixes the ids, as hash routing does."""
    scores = np.sqrt(np.logaddexp(0, x @ weight.T))
    if chosen is None:
        assert bias is not None
        chosen = np.argsort(-(scores + bias), -1, kind="stable")[:, :top_k]
    picked = np.take_along_axis(scores, chosen, -1)
    if top_k > 1:
        picked = picked / (picked.sum(-1, keepdims=True) + 1e-20)
    return chosen, picked * scaling


def markov(
    base: Array, anchors: Array, embed: Array, head: Array, choose: Callable[[Array, int], Array]
) -> tuple[Array, Array, Array]:
    """Tokens [n, B], features [n, B, R] and corrected logits [n, B, V]; slot i's bias comes from its input.

    ``choose(logits [n, V], slot)`` picks the slot's tokens.
    """
    previous, tokens, features, corrected = np.asarray(anchors), [], [], []
    for slot in range(base.shape[1]):
        feature = embed[previous]
        logits = base[:, slot] + feature @ head.T
        previous = choose(logits, slot)
        tokens.append(previous)
        features.append(feature)
        corrected.append(logits)
    return np.stack(tokens, 1), np.stack(features, 1), np.stack(corrected, 1)
