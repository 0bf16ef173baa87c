"""Arithmetic that the attention operations and the cache insertion share (spec 3.0, 3.5).

One KV head serves as key and value. Rows enter the operations normalised but not rotated; RoPE, the
cache's quantisation and the inverse RoPE of the output happen inside, so that what is cached and what
is attended to within a call are the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import act_quant_dequant, apply_rope, pointwise, rope_tables

KEY_BLOCK = 64
"""Keys that share one running maximum; part of the released rounding order."""


@dataclass(frozen=True, kw_only=True)
class CacheAttributes:
    """How a normalised kv row becomes a cache entry."""

    rope_dims: int
    rope_theta: float
    quant_width: int
    """Leading channels that are rounded through FP8; 0 leaves the row alone (``dequantized``)."""
    quant_group: int
    """Channels that share one power-of-two scale."""
    head_dim: int


def cache_entry(kv: Tensor, positions: Tensor, attributes: CacheAttributes) -> Tensor:
    """Rotate kv [..., D] to ``positions`` [...] and round it as the cache stores it."""
    cos, sin = rope_tables(positions, attributes.rope_dims, attributes.rope_theta)
    entry = apply_rope(kv, cos, sin)
    width = attributes.quant_width
    if width:
        entry = torch.cat((act_quant_dequant(entry[..., :width], attributes.quant_group), entry[..., width:]), -1)
    return entry


def sink_attention(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """Softmax attention with a sink logit per head; keys are also the values.

    Blocks of 64 keys in order: running maximum m, denominator += sum exp(s - m) in float32, weighted
    sum with the probabilities rounded to q's dtype. The sink joins the denominator at the end and is
    not multiplied by the softmax scale. A row without a valid key is zero.

    Args:
        q: [rows, heads, D]; keys: [rows, K, D]; valid: [rows, K] bool; sink: [heads] float32.

    Returns:
        [rows, heads, D] in q's dtype.
    """
    wide = torch.float64 if q.device.type == "cpu" and q.dtype != torch.float32 else torch.float32
    scores = torch.matmul(q.to(wide), keys.to(wide).transpose(1, 2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    maximum = torch.full(q.shape[:2], -1e30, device=q.device)
    denominator = torch.zeros(q.shape[:2], device=q.device)
    total = torch.zeros(q.shape, device=q.device)
    for start in range(0, keys.shape[1], KEY_BLOCK):
        block = scores[..., start : start + KEY_BLOCK]
        new_maximum = torch.maximum(maximum, block.amax(-1))
        correction = pointwise(torch.exp, maximum - new_maximum)
        p = pointwise(torch.exp, block - new_maximum.unsqueeze(-1))
        denominator = denominator * correction + p.sum(-1)
        weighted = torch.matmul(p.to(q.dtype).to(wide), keys[:, start : start + KEY_BLOCK].to(wide)).float()
        total = total * correction.unsqueeze(-1) + weighted
        maximum = new_maximum
    denominator = denominator + pointwise(torch.exp, sink - maximum)
    out = (total / denominator.unsqueeze(-1)).to(q.dtype)
    return out.masked_fill(~valid.any(-1)[:, None, None], 0)


ONNX_ROTATE = """
    {out}_nope, {out}_rope = Split<axis=-1>({x}, {parts})
    {out}_float = Cast<to=1>({out}_rope)
    {out}_even = Slice({out}_float, rope_zero, rope_end, rope_last, rope_two)
    {out}_odd = Slice({out}_float, rope_one, rope_end, rope_last, rope_two)
    {out}_ec = Mul({out}_even, {cos})
    {out}_os = Mul({out}_odd, {sin})
    {out}_es = Mul({out}_even, {sin})
    {out}_oc = Mul({out}_odd, {cos})
    {out}_new_even = {even}({out}_ec, {out}_os)
    {out}_new_odd = {odd}({out}_oc, {out}_es)
    {out}_even_column = Unsqueeze({out}_new_even, rope_last)
    {out}_odd_column = Unsqueeze({out}_new_odd, rope_last)
    {out}_pairs = Concat<axis=-1>({out}_even_column, {out}_odd_column)
    {out}_shape = Shape({out}_rope)
    {out}_flat = Reshape({out}_pairs, {out}_shape)
    {out}_cast = {cast}({out}_flat)
    {out} = Concat<axis=-1>({out}_nope, {out}_cast)
"""


def onnx_rotate(x: str, out: str, cos: str, sin: str, cast: str, *, inverse: bool = False) -> str:
    """ONNX text that rotates ``x`` into ``out``; needs :func:`onnx_rope_tables` before it."""
    even, odd = ("Add", "Sub") if inverse else ("Sub", "Add")
    return ONNX_ROTATE.format(x=x, out=out, cos=cos, sin=sin, cast=cast, even=even, odd=odd, parts="rope_parts")


def onnx_rope_tables(positions: str, attributes: CacheAttributes, head_dim: int) -> str:
    """ONNX text: ``cos`` and ``sin`` [rows, rope_dims / 2] of int32 ``positions`` [rows], and constants."""
    half = attributes.rope_dims // 2
    exponents = torch.arange(0, attributes.rope_dims, 2, dtype=torch.float32) / attributes.rope_dims
    frequencies = ", ".join(repr(float(v)) for v in 1.0 / attributes.rope_theta**exponents)
    return f"""
        rope_zero = Constant<value = int64[1] {{0}}>()
        rope_one = Constant<value = int64[1] {{1}}>()
        rope_two = Constant<value = int64[1] {{2}}>()
        rope_end = Constant<value = int64[1] {{{attributes.rope_dims}}}>()
        rope_last = Constant<value = int64[1] {{-1}}>()
        rope_parts = Constant<value = int64[2] {{{head_dim - attributes.rope_dims}, {attributes.rope_dims}}}>()
        frequencies = Constant<value = float[1, {half}] {{{frequencies}}}>()
        float_positions = Cast<to=1>({positions})
        position_column = Unsqueeze(float_positions, rope_last)
        angles = Mul(position_column, frequencies)
        cos = Cos(angles)
        sin = Sin(angles)
    """


def onnx_quantize(x: str, out: str, attributes: CacheAttributes, head_dim: int, cast: str) -> str:
    """ONNX text that rounds the leading channels of ``x`` [rows, D] through FP8, as the cache does."""
    width = attributes.quant_width
    if not width:
        return f"{out} = Identity({x})"
    if width == head_dim:
        return onnx_act_quant_dequant(x, out, attributes.quant_group, cast)
    return f"""
        {out}_parts = Constant<value = int64[2] {{{width}, {head_dim - width}}}>()
        {out}_head, {out}_tail = Split<axis=-1>({x}, {out}_parts)
        {onnx_act_quant_dequant(f"{out}_head", f"{out}_rounded", attributes.quant_group, cast)}
        {out} = Concat<axis=-1>({out}_rounded, {out}_tail)
    """


def onnx_sink_attention(q: str, keys: str, valid: str, sink: str, out: str, head_dim: int, cast: str) -> str:
    """ONNX text of :func:`sink_attention` with one maximum over all keys.

    Args:
        q: [n, m, D] in the activation type; keys: [n, K, D] likewise; valid: [n, K] bool.
        sink: float32, broadcasts to [n, m, 1].
    """
    return f"""
        {out}_zero = Constant<value = int64[1] {{0}}>()
        {out}_one = Constant<value = int64[1] {{1}}>()
        {out}_last = Constant<value = int64[1] {{2}}>()
        {out}_nothing = Constant<value = float {{0.0}}>()
        {out}_nothing_cast = {cast}({out}_nothing)
        {out}_valid_key = Unsqueeze({valid}, {out}_last)
        {out}_clean = Where({out}_valid_key, {keys}, {out}_nothing_cast)
        {out}_keys = Cast<to=1>({out}_clean)
        {out}_q = Cast<to=1>({q})
        {out}_keys_t = Transpose<perm=[0, 2, 1]>({out}_keys)
        {out}_products = MatMul({out}_q, {out}_keys_t)
        {out}_softmax_scale = Constant<value = float {{{head_dim**-0.5!r}}}>()
        {out}_scores = Mul({out}_products, {out}_softmax_scale)
        {out}_valid_row = Unsqueeze({valid}, {out}_one)
        {out}_lowest = Constant<value = float {{-1e30}}>()
        {out}_masked = Where({out}_valid_row, {out}_scores, {out}_lowest)
        {out}_maximum = ReduceMax<keepdims=1>({out}_masked, {out}_last)
        {out}_shifted = Sub({out}_masked, {out}_maximum)
        {out}_exponentials = Exp({out}_shifted)
        {out}_valid_float = Cast<to=1>({out}_valid_row)
        {out}_p = Mul({out}_exponentials, {out}_valid_float)
        {out}_sums = ReduceSum<keepdims=1>({out}_p, {out}_last)
        {out}_sink_shifted = Sub({sink}, {out}_maximum)
        {out}_sink_exp = Exp({out}_sink_shifted)
        {out}_denominator = Add({out}_sums, {out}_sink_exp)
        {out}_weighted = MatMul({out}_p, {out}_keys)
        {out}_normalised = Div({out}_weighted, {out}_denominator)
        {out} = {cast}({out}_normalised)
    """


ONNX_INSIDE = """
    ring_shape = Shape(ring)
    slot_count = Gather(ring_shape, zero)
    ring_rows = Gather(ring_shape, one)
    zero_scalar = Constant<value = int64 {0}>()
    never = Constant<value = int64 {-1}>()
    slot64 = Cast<to=7>(slots)
    not_negative = Greater(slot64, never)
    below = Less(slot64, slot_count)
    inside = And(not_negative, below)
    safe_slot = Where(inside, slot64, zero_scalar)
"""
"""ONNX text: sizes of ``ring``, whether each of ``slots`` is one of its slots, and an index that is."""


def onnx_act_quant_dequant(x: str, out: str, group: int, cast: str) -> str:
    """ONNX text of :func:`~.numerics.act_quant_dequant` over [rows, width].

    The power of two is found by logarithm and then corrected against an exact table, so the scale has
    the same bits as the reference's.
    """
    powers = ", ".join(repr(2.0**e) for e in range(-24, 32))
    return f"""
        {out}_grouped_shape = Constant<value = int64[3] {{0, -1, {group}}}>()
        {out}_flat_shape = Constant<value = int64[2] {{0, -1}}>()
        {out}_last = Constant<value = int64[1] {{2}}>()
        {out}_float = Cast<to=1>({x})
        {out}_grouped = Reshape({out}_float, {out}_grouped_shape)
        {out}_abs = Abs({out}_grouped)
        {out}_max = ReduceMax<keepdims=1>({out}_abs, {out}_last)
        {out}_floor = Constant<value = float {{1e-4}}>()
        {out}_amax = Max({out}_max, {out}_floor)
        {out}_inverse = Constant<value = float {{{float(torch.tensor(1.0 / 448.0))!r}}}>()
        {out}_t = Mul({out}_amax, {out}_inverse)
        {out}_powers = Constant<value = float[56] {{{powers}}}>()
        {out}_log = Log({out}_t)
        {out}_ln2 = Constant<value = float {{{float(torch.tensor(2.0).log())!r}}}>()
        {out}_log2 = Div({out}_log, {out}_ln2)
        {out}_guess = Ceil({out}_log2)
        {out}_guess_int = Cast<to=7>({out}_guess)
        {out}_bias = Constant<value = int64 {{23}}>()
        {out}_lower = Add({out}_guess_int, {out}_bias)
        {out}_one = Constant<value = int64 {{1}}>()
        {out}_middle = Add({out}_lower, {out}_one)
        {out}_upper = Add({out}_middle, {out}_one)
        {out}_lower_power = Gather({out}_powers, {out}_lower)
        {out}_middle_power = Gather({out}_powers, {out}_middle)
        {out}_upper_power = Gather({out}_powers, {out}_upper)
        {out}_lower_ok = GreaterOrEqual({out}_lower_power, {out}_t)
        {out}_middle_ok = GreaterOrEqual({out}_middle_power, {out}_t)
        {out}_not_lower = Where({out}_middle_ok, {out}_middle_power, {out}_upper_power)
        {out}_scale = Where({out}_lower_ok, {out}_lower_power, {out}_not_lower)
        {out}_scaled = Div({out}_grouped, {out}_scale)
        {out}_e4m3_max = Constant<value = float {{448.0}}>()
        {out}_e4m3_min = Constant<value = float {{-448.0}}>()
        {out}_clipped = Clip({out}_scaled, {out}_e4m3_min, {out}_e4m3_max)
        {out}_codes = Cast<to=17>({out}_clipped)
        {out}_values = Cast<to=1>({out}_codes)
        {out}_rescaled = Mul({out}_values, {out}_scale)
        {out}_flat = Reshape({out}_rescaled, {out}_flat_shape)
        {out} = {cast}({out}_flat)
    """
