"""DraftAttention: every row of a draft block sees the same keys (spec 3.5).

Request r drafts a block of B rows at positions p_r .. p_r + B - 1, p_r its anchor's position. The keys
of all B rows are the ring entries of the request's slot, in ring order, followed by the B rows
themselves: not causal, at most W + B keys. Ring entries are valid up to ``min(W, p_r)``: all positions
before the anchor have been inserted. The output is rotated back to the row's position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import (
    ONNX_INSIDE,
    CacheAttributes,
    cache_entry,
    onnx_quantize,
    onnx_rope_tables,
    onnx_rotate,
    onnx_sink_attention,
    sink_attention,
)
from .numerics import apply_rope, rope_tables
from .op import Op, TensorSpec


class DraftAttention(Op):
    name = "DraftAttention"
    attributes_type = CacheAttributes
    all_inputs = (
        TensorSpec("q", "T", ("requests", "B", "N", "head_dim")),
        TensorSpec("kv", "T", ("requests", "B", "head_dim")),
        TensorSpec("positions", "int32", ("requests",)),
        TensorSpec("slots", "int32", ("requests",)),
        TensorSpec("ring", "T", ("S", "W", "head_dim")),
        TensorSpec("sink", "float32", ("N",)),
    )
    all_outputs = (TensorSpec("attended", "T", ("requests", "B", "N", "head_dim")),)

    def reference(
        self,
        attributes: CacheAttributes,
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

    def onnx_body(self, attributes: CacheAttributes, cast: str) -> str:
        dim = attributes.head_dim
        return f"""
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            two = Constant<value = int64[1] {{2}}>()
            minus_one = Constant<value = int64[1] {{-1}}>()
            one_scalar = Constant<value = int64 {{1}}>()
            {ONNX_INSIDE}
            q_shape = Shape(q)
            block = Gather(q_shape, one)
            heads = Gather(q_shape, two)
            block_scalar = Squeeze(block, zero)
            ring_rows_scalar = Squeeze(ring_rows, zero)
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
            context = Gather<axis=0>(ring, safe_slot)
            keys = Concat<axis=1>(context, own)
            ring_index = Range(zero_scalar, ring_rows_scalar, one_scalar)
            ring_row = Unsqueeze(ring_index, zero)
            context_valid = Less(ring_row, anchor_column)
            inside_column = Unsqueeze(inside, one)
            own_row = Unsqueeze(steps, zero)
            own_always = Greater(own_row, never)
            own_valid = And(inside_column, own_always)
            context_inside = And(context_valid, inside_column)
            valid = Concat<axis=1>(context_inside, own_valid)
            cos_head = Unsqueeze(cos, one)
            sin_head = Unsqueeze(sin, one)
            head_dim = Constant<value = int64[1] {{{dim}}}>()
            head_rows = Concat<axis=0>(minus_one, heads, head_dim)
            q_rows = Reshape(q, head_rows)
            {onnx_rotate("q_rows", "q_rotated", "cos_head", "sin_head", cast)}
            block_heads = Mul(block, heads)
            merged_shape = Concat<axis=0>(minus_one, block_heads, head_dim)
            q_merged = Reshape(q_rotated, merged_shape)
            sink_wide_shape = Concat<axis=0>(block, heads)
            sink_wide = Expand(sink, sink_wide_shape)
            sink_shape = Concat<axis=0>(one, block_heads, one)
            sink_column = Reshape(sink_wide, sink_shape)
            {onnx_sink_attention("q_merged", "keys", "valid", "sink_column", "out", dim, cast)}
            inside_all = Unsqueeze(inside_column, two)
            visible = Where(inside_all, out, out_nothing_cast)
            out_rows = Reshape(visible, head_rows)
            {onnx_rotate("out_rows", "unrotated", "cos_head", "sin_head", cast, inverse=True)}
            attended = Reshape(unrotated, q_shape)
        """


DRAFT_ATTENTION = DraftAttention()
