"""ContextKvInsert: writes rows into a ring cache in place (spec section 4).

Row t of slot s at position p becomes ring[s, p mod W], rotated and rounded as the cache stores it. The
result is that of writing the rows in position order: where a call carries more than W rows of one slot,
the last W stay. A slot outside 0..S-1 (rejected or padding rows carry -1) writes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import ONNX_INSIDE, CacheAttributes, cache_entry, onnx_quantize, onnx_rope_tables, onnx_rotate
from .op import Op, TensorSpec


class ContextKvInsert(Op):
    name = "ContextKvInsert"
    attributes_type = CacheAttributes
    all_inputs = (
        TensorSpec("kv", "T", ("rows", "head_dim")),
        TensorSpec("positions", "int32", ("rows",)),
        TensorSpec("slots", "int32", ("rows",)),
        TensorSpec("ring", "T", ("S", "W", "head_dim")),
    )
    all_outputs = (TensorSpec("ring_out", "T", ("S", "W", "head_dim"), alias="ring"),)

    def reference(
        self, attributes: CacheAttributes, kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor
    ) -> Tensor:
        slot_count, window = ring.shape[:2]
        inside = (slots >= 0) & (slots < slot_count)
        slot = torch.where(inside, slots, slot_count).long()
        newest = torch.full((slot_count + 1,), -1, dtype=torch.int32, device=ring.device)
        newest = newest.scatter_reduce(0, slot, positions, "amax")
        written = inside & (positions > newest[slot] - window)
        out = ring.clone()
        entries = cache_entry(kv, positions, attributes)
        out[slots[written].long(), (positions[written] % window).long()] = entries[written]
        return out

    def onnx_body(self, attributes: CacheAttributes, cast: str) -> str:
        dim = attributes.head_dim
        # Rows that write nothing go to one spare row after the ring, which is cut off again.
        return f"""
            {onnx_rope_tables("positions", attributes, dim)}
            {onnx_rotate("kv", "rotated", "cos", "sin", cast)}
            {onnx_quantize("rotated", "entries", attributes, dim, cast)}
            zero = Constant<value = int64[1] {{0}}>()
            one = Constant<value = int64[1] {{1}}>()
            {ONNX_INSIDE}
            position64 = Cast<to=7>(positions)
            same_a = Unsqueeze(slot64, zero)
            same_b = Unsqueeze(slot64, one)
            same = Equal(same_a, same_b)
            position_row = Unsqueeze(position64, zero)
            same_positions = Where(same, position_row, never)
            newest = ReduceMax<keepdims=0>(same_positions, one)
            oldest = Sub(newest, ring_rows)
            kept = Greater(position64, oldest)
            written = And(kept, inside)
            index_in_ring = Mod(position64, ring_rows)
            slot_base = Mul(slot64, ring_rows)
            index = Add(slot_base, index_in_ring)
            spare = Mul(slot_count, ring_rows)
            target = Where(written, index, spare)
            target_column = Unsqueeze(target, one)
            flat_shape = Constant<value = int64[2] {{-1, {dim}}}>()
            flat = Reshape(ring, flat_shape)
            nothing_float = Constant<value = float[1, {dim}] {{{", ".join(["0"] * dim)}}}>()
            nothing = {cast}(nothing_float)
            extended = Concat<axis=0>(flat, nothing)
            scattered = ScatterND(extended, target_column, entries)
            cut = Slice(scattered, zero, spare, zero)
            ring_out = Reshape(cut, ring_shape)
        """


CONTEXT_KV_INSERT = ContextKvInsert()
