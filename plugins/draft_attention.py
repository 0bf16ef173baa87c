"""DraftAttention: every row of a draft block sees the same keys (spec 3.5).

Request r drafts a block of B rows at positions p_r .. p_r + B - 1, p_r its anchor's position. The keys
of all B rows are the ring entries of the request's slot, in ring order, followed by the B rows
themselves: not causal, at most W + B keys. Ring entries are valid up to ``min(W, p_r)``: all positions
before the anchor have been inserted. The output is rotated back to the row's position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import (
    CacheAttributes,
    cache_entry,
    onnx_quantize,
    onnx_rope_tables,
    onnx_rotate,
    sink_attention,
)
from .numerics import apply_rope, rope_tables
from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes(CacheAttributes):
    head_dim: int


class DraftAttention(Op):
    name = "DraftAttention"
    attributes_type = Attributes
    widest = Attributes(rope_dims=64, rope_theta=1e4, quant_width=512, quant_group=32, head_dim=512)

    def inputs(self, attributes: Attributes) -> tuple[TensorSpec, ...]:
        dim = attributes.head_dim
        return (
            TensorSpec("q", "T", ("requests", "B", "N", dim)),
            TensorSpec("kv", "T", ("requests", "B", dim)),
            TensorSpec("positions", "int32", ("requests",)),
            TensorSpec("slots", "int32", ("requests",)),
            TensorSpec("ring", "T", ("S", "W", dim)),
            TensorSpec("sink", "float32", ("N",)),
        )

    def outputs(self, attributes: Attributes) -> tuple[TensorSpec, ...]:
        return (TensorSpec("attended", "T", ("requests", "B", "N", attributes.head_dim)),)

    def reference(
        self,
        attributes: Attributes,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        slots: Tensor,
        ring: Tensor,
        sink: Tensor,
    ) -> Tensor:
        requests, block = q.shape[:2]
        slot_count, window = ring.shape[:2]
        row_positions = positions.unsqueeze(1) + torch.arange(block, dtype=torch.int32, device=q.device)
        own = cache_entry(kv, row_positions, attributes)
        inside = (slots >= 0) & (slots < slot_count)
        keys = torch.cat((ring[torch.where(inside, slots, 0).long()], own), 1)
        ring_valid = torch.arange(window, device=q.device) < positions.unsqueeze(1)
        valid = torch.cat((ring_valid, ring_valid.new_ones(requests, block)), 1) & inside.unsqueeze(1)
        # An unwritten ring row may hold anything, and 0 * NaN is NaN.
        keys = keys.masked_fill(~valid.unsqueeze(-1), 0)

        cos, sin = rope_tables(row_positions, attributes.rope_dims, attributes.rope_theta)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        rotated = apply_rope(q, cos, sin)
        out = sink_attention(
            rotated.flatten(0, 1), keys.repeat_interleave(block, 0), valid.repeat_interleave(block, 0), sink
        )
        return apply_rope(out.unflatten(0, (requests, block)), cos, sin, inverse=True)

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        dim = attributes.head_dim
        return f"""
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            two = Constant<value = int64[1] {{2}}>()
            minus_one = Constant<value = int64[1] {{-1}}>()
            zero_scalar = Constant<value = int64 {{0}}>()
            one_scalar = Constant<value = int64 {{1}}>()
            q_shape = Shape(q)
            block = Gather(q_shape, one)
            heads = Gather(q_shape, two)
            block_scalar = Squeeze(block, zero)
            ring_shape = Shape(ring)
            slot_count = Gather(ring_shape, zero)
            window = Gather(ring_shape, one)
            window_scalar = Squeeze(window, zero)
            steps = Range(zero_scalar, block_scalar, one_scalar)
            position64 = Cast<to=7>(positions)
            anchor_column = Unsqueeze(position64, one)
            row_positions = Add(anchor_column, steps)
            flat_positions = Reshape(row_positions, minus_one)
            {onnx_rope_tables("flat_positions", attributes, dim)}
            flat_rows = Constant<value = int64[2] {{-1, {dim}}}>()
            kv_flat = Reshape(kv, flat_rows)
            {onnx_rotate("kv_flat", "kv_rotated", "cos", "sin", cast)}
            {onnx_quantize("kv_rotated", "entries", attributes, dim, cast)}
            kv_shape = Shape(kv)
            own = Reshape(entries, kv_shape)
            slot64 = Cast<to=7>(slots)
            slot_floor = Max(slot64, zero_scalar)
            last_slot = Sub(slot_count, one)
            safe_slot = Min(slot_floor, last_slot)
            context = Gather<axis=0>(ring, safe_slot)
            keys_raw = Concat<axis=1>(context, own)
            ring_index = Range(zero_scalar, window_scalar, one_scalar)
            ring_row = Unsqueeze(ring_index, zero)
            context_valid = Less(ring_row, anchor_column)
            never = Constant<value = int64 {{-1}}>()
            not_negative = Greater(slot64, never)
            below = Less(slot64, slot_count)
            inside = And(not_negative, below)
            inside_column = Unsqueeze(inside, one)
            own_valid_int = Add(steps, one_scalar)
            own_positive = Greater(own_valid_int, zero_scalar)
            own_row = Unsqueeze(own_positive, zero)
            own_valid = And(inside_column, own_row)
            context_inside = And(context_valid, inside_column)
            valid = Concat<axis=1>(context_inside, own_valid)
            valid_key = Unsqueeze(valid, two)
            nothing_float = Constant<value = float {{0.0}}>()
            nothing = {cast}(nothing_float)
            keys_clean = Where(valid_key, keys_raw, nothing)
            keys = Cast<to=1>(keys_clean)
            cos_head = Unsqueeze(cos, one)
            sin_head = Unsqueeze(sin, one)
            head_dim = Constant<value = int64[1] {{{dim}}}>()
            head_rows = Concat<axis=0>(minus_one, heads, head_dim)
            q_rows = Reshape(q, head_rows)
            {onnx_rotate("q_rows", "q_rotated", "cos_head", "sin_head", cast)}
            q_back = Reshape(q_rotated, q_shape)
            q_float = Cast<to=1>(q_back)
            block_heads = Mul(block, heads)
            merged_shape = Concat<axis=0>(minus_one, block_heads, head_dim)
            q_merged = Reshape(q_float, merged_shape)
            keys_t = Transpose<perm=[0, 2, 1]>(keys)
            products = MatMul(q_merged, keys_t)
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
            sink_shape = Concat<axis=0>(one, one, heads, one)
            sink_head = Reshape(sink, sink_shape)
            per_head_shape = Concat<axis=0>(minus_one, block, heads, one)
            maximum_head = Reshape(maximum, per_head_shape)
            sink_shifted = Sub(sink_head, maximum_head)
            sink_exp = Exp(sink_shifted)
            merged_one = Concat<axis=0>(minus_one, block_heads, one)
            sink_column = Reshape(sink_exp, merged_one)
            denominator = Add(sums, sink_column)
            weighted = MatMul(p, keys)
            normalised = Div(weighted, denominator)
            inside_all = Unsqueeze(inside_column, two)
            zero_float = Constant<value = float {{0.0}}>()
            out_float = Where(inside_all, normalised, zero_float)
            out_rows = Reshape(out_float, head_rows)
            out_cast = {cast}(out_rows)
            {onnx_rotate("out_cast", "unrotated", "cos_head", "sin_head", cast, inverse=True)}
            attended = Reshape(unrotated, q_shape)
        """


DRAFT_ATTENTION = DraftAttention()
