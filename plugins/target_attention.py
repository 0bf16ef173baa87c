"""TargetAttention: causal sliding-window attention of the target over its ring cache (spec 3.0).

A call first inserts its rows into the ring (:mod:`.context_kv_insert`) and then attends: the row at
position p of slot s reads the entries of positions p - W + 1 .. p from ring[s, x mod Wr], in position
order. A ring of Wr >= W + L rows serves calls of up to L rows per request: what such a call overwrites is
older than every window in it, so rows of rejected drafts never hide history either. The layout of a
row's keys depends on its position alone, not on the other rows of the call. A slot outside 0..S-1 gives
a zero row. The output is rotated back to the row's position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import ONNX_INSIDE, CacheAttributes, onnx_rope_tables, onnx_rotate, onnx_sink_attention, sink_attention
from .numerics import apply_rope, rope_tables
from .op import Op, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Attributes(CacheAttributes):
    window: int
    """Positions that a row sees, its own included."""


class TargetAttention(Op):
    name = "TargetAttention"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("q", "T", ("rows", "N", "head_dim")),
        TensorSpec("positions", "int32", ("rows",)),
        TensorSpec("slots", "int32", ("rows",)),
        TensorSpec("ring", "T", ("S", "W", "head_dim")),
        TensorSpec("sink", "float32", ("N",)),
    )
    all_outputs = (TensorSpec("attended", "T", ("rows", "N", "head_dim")),)

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        rows, window = sizes["W"], attributes.window
        return "" if rows >= window else f"ring has {rows} rows per slot, expected {window} (the window) or more"

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
            {ONNX_INSIDE}
            offsets = Constant<value = int64[{attributes.window}] {{{offsets}}}>()
            position64 = Cast<to=7>(positions)
            position_column64 = Unsqueeze(position64, one)
            key_positions = Add(position_column64, offsets)
            inside_column = Unsqueeze(inside, one)
            written = Greater(key_positions, never)
            valid = And(written, inside_column)
            slot_column = Unsqueeze(safe_slot, one)
            slot_base = Mul(slot_column, ring_rows)
            safe_positions = Max(key_positions, zero_scalar)
            in_ring = Mod(safe_positions, ring_rows)
            index = Add(slot_base, in_ring)
            flat_shape = Constant<value = int64[2] {{-1, {dim}}}>()
            flat = Reshape(ring, flat_shape)
            keys = Gather<axis=0>(flat, index)
            cos_head = Unsqueeze(cos, one)
            sin_head = Unsqueeze(sin, one)
            {onnx_rotate("q", "q_rotated", "cos_head", "sin_head", cast)}
            sink_row = Unsqueeze(sink, zero)
            sink_column = Unsqueeze(sink_row, two)
            {onnx_sink_attention("q_rotated", "keys", "valid", "sink_column", "out", dim, cast)}
            inside_head = Unsqueeze(inside_column, two)
            visible = Where(inside_head, out, out_nothing_cast)
            {onnx_rotate("visible", "attended", "cos_head", "sin_head", cast, inverse=True)}
        """


TARGET_ATTENTION = TargetAttention()
