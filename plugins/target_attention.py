"""TargetAttention: causal sliding-window attention of the target over its ring cache (spec 3.0).

A call first inserts its rows into the ring (:mod:`.context_kv_insert`) and then attends: the row at
position p of slot s reads the entries of positions p - W + 1 .. p from ring[s, x mod Wr], in position
order. A ring of Wr >= W + L rows serves calls of up to L rows a request: what such a call overwrites is
older than every window in it, so rows of rejected drafts never hide history either. The layout of a
row's keys depends on its position alone, not on the other rows of the call. A slot outside 0..S-1 gives
a zero row. The output is rotated back to the row's position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import CacheAttributes, onnx_rope_tables, onnx_rotate, sink_attention
from .numerics import apply_rope, rope_tables
from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes(CacheAttributes):
    head_dim: int
    window: int
    """Positions that a row sees, its own included."""


class TargetAttention(Op):
    name = "TargetAttention"
    attributes_type = Attributes
    widest = Attributes(rope_dims=64, rope_theta=1e4, quant_width=512, quant_group=32, head_dim=512, window=128)

    def inputs(self, attributes: Attributes) -> tuple[TensorSpec, ...]:
        dim = attributes.head_dim
        return (
            TensorSpec("q", "T", ("rows", "N", dim)),
            TensorSpec("positions", "int32", ("rows",)),
            TensorSpec("slots", "int32", ("rows",)),
            TensorSpec("ring", "T", ("S", "W", dim)),
            TensorSpec("sink", "float32", ("N",)),
        )

    def outputs(self, attributes: Attributes) -> tuple[TensorSpec, ...]:
        return (TensorSpec("attended", "T", ("rows", "N", attributes.head_dim)),)

    def reference(
        self, attributes: Attributes, q: Tensor, positions: Tensor, slots: Tensor, ring: Tensor, sink: Tensor
    ) -> Tensor:
        slot_count, ring_rows = ring.shape[:2]
        key_positions = positions.unsqueeze(1) + torch.arange(
            1 - attributes.window, 1, dtype=torch.int32, device=q.device
        )
        inside = (slots >= 0) & (slots < slot_count)
        valid = (key_positions >= 0) & inside.unsqueeze(1)
        index = torch.where(inside, slots, 0).unsqueeze(1) * ring_rows + key_positions.remainder(ring_rows)
        keys = ring.flatten(0, 1)[index.long()]
        # An unwritten ring row may hold anything, and 0 * NaN is NaN.
        keys = keys.masked_fill(~valid.unsqueeze(-1), 0)
        cos, sin = rope_tables(positions, attributes.rope_dims, attributes.rope_theta)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        out = sink_attention(apply_rope(q, cos, sin), keys, valid, sink)
        return apply_rope(out, cos, sin, inverse=True)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        dim = attributes.head_dim
        offsets = ", ".join(str(o) for o in range(1 - attributes.window, 1))
        return f"""
            {onnx_rope_tables("positions", attributes, dim)}
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            two = Constant<value = int64[1] {{2}}>()
            zero_scalar = Constant<value = int64 {{0}}>()
            never = Constant<value = int64 {{-1}}>()
            ring_shape = Shape(ring)
            slot_count = Gather(ring_shape, zero)
            ring_rows = Gather(ring_shape, one)
            offsets = Constant<value = int64[{attributes.window}] {{{offsets}}}>()
            position64 = Cast<to=7>(positions)
            position_column64 = Unsqueeze(position64, one)
            key_positions = Add(position_column64, offsets)
            slot64 = Cast<to=7>(slots)
            not_negative = Greater(slot64, never)
            below = Less(slot64, slot_count)
            inside = And(not_negative, below)
            inside_column = Unsqueeze(inside, one)
            written = Greater(key_positions, never)
            valid = And(written, inside_column)
            safe_slot = Where(inside, slot64, zero_scalar)
            slot_column = Unsqueeze(safe_slot, one)
            slot_base = Mul(slot_column, ring_rows)
            safe_positions = Max(key_positions, zero_scalar)
            in_ring = Mod(safe_positions, ring_rows)
            index = Add(slot_base, in_ring)
            flat_shape = Constant<value = int64[2] {{-1, {dim}}}>()
            flat = Reshape(ring, flat_shape)
            keys_raw = Gather<axis=0>(flat, index)
            valid_key = Unsqueeze(valid, two)
            nothing_float = Constant<value = float {{0.0}}>()
            nothing = {cast}(nothing_float)
            keys_clean = Where(valid_key, keys_raw, nothing)
            keys = Cast<to=1>(keys_clean)
            cos_head = Unsqueeze(cos, one)
            sin_head = Unsqueeze(sin, one)
            {onnx_rotate("q", "q_rotated", "cos_head", "sin_head", cast)}
            q_float = Cast<to=1>(q_rotated)
            keys_t = Transpose<perm=[0, 2, 1]>(keys)
            products = MatMul(q_float, keys_t)
            softmax_scale = Constant<value = float {{{dim**-0.5!r}}}>()
            scores = Mul(products, softmax_scale)
            valid_row = Unsqueeze(valid, one)
            hidden_score = Constant<value = float {{-1e30}}>()
            masked = Where(valid_row, scores, hidden_score)
            maximum = ReduceMax<keepdims=1>(masked, two)
            shifted = Sub(masked, maximum)
            exponentials = Exp(shifted)
            valid_float = Cast<to=1>(valid_row)
            p = Mul(exponentials, valid_float)
            sums = ReduceSum<keepdims=1>(p, two)
            sink_row = Unsqueeze(sink, zero)
            sink_column = Unsqueeze(sink_row, two)
            sink_shifted = Sub(sink_column, maximum)
            sink_exp = Exp(sink_shifted)
            denominator = Add(sums, sink_exp)
            weighted = MatMul(p, keys)
            normalised = Div(weighted, denominator)
            inside_head = Unsqueeze(inside_column, two)
            out_float = Where(inside_head, normalised, nothing_float)
            out_cast = {cast}(out_float)
            {onnx_rotate("out_cast", "attended", "cos_head", "sin_head", cast, inverse=True)}
        """


TARGET_ATTENTION = TargetAttention()
