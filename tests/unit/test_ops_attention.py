"""Ring cache and attention: faults that others shipped (rows KV-2 to KV-8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.plugins import draft_attention
from dspark_trt.plugins.attention import sink_attention
from dspark_trt.plugins.context_kv_insert import CONTEXT_KV_INSERT
from dspark_trt.plugins.draft_attention import DRAFT_ATTENTION
from dspark_trt.plugins.op import OpError
from dspark_trt.plugins.target_attention import TARGET_ATTENTION
from torch import Tensor

from tests.configs import ids
from tests.op_examples import Example, run_onnx
from tests.oracle import numpy_ops as ops
from tests.oracle.numpy_ops import Array

WINDOW, DIM, HEADS, BLOCK = 128, 32, 2, 5
CACHE: dict[str, Any] = {"rope_dims": 8, "rope_theta": 1e4, "quant_width": 32, "quant_group": 32, "head_dim": DIM}
PLAIN = {**CACHE, "quant_width": 0}
SINK = torch.tensor([2.0, 3.0])
OUTSIDE = (-1, -(2**31), 4, 5, 2**31 - 1)
"""Slots that a cache of four does not have."""


def block_inputs(requests: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(requests, BLOCK, HEADS, DIM, generator=generator).to(dtype)
    return q, torch.randn(requests, BLOCK, DIM, generator=generator).to(dtype)


def ring_of(seed: int, slots: int = 4, rows: int = WINDOW, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(slots, rows, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(ring: Tensor, written: int, how: str) -> Tensor:
    """``ring`` whose rows from ``written`` on hold NaN, or the byte 0xFF throughout (a NaN as well)."""
    ring = ring.clone()
    if how == "nan":
        ring[:, written:] = torch.nan
    else:
        ring[:, written:].view(torch.int8).fill_(-1)
    return ring


def draft(q: Tensor, kv: Tensor, context: int, ring: Tensor) -> Tensor:
    """One request in slot 1 with ``context`` positions before its anchor."""
    return DRAFT_ATTENTION(q, kv, ids(context), ids(1), ring, SINK, **CACHE)


def target(q: Tensor, position: int, ring: Tensor) -> Tensor:
    """One row in slot 3."""
    return TARGET_ATTENTION(q, ids(position), ids(3), ring, SINK, window=WINDOW, **CACHE)


# Unwritten rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("context", [0, 1, 127, 128])
def test_draft_never_reads_unwritten_rows(context: int, dtype: torch.dtype) -> None:
    """KV-2: the same bits over zeros, NaN and 0xFF; without any context the block sees itself."""
    q, kv = block_inputs(1, seed=context, dtype=dtype)
    ring = ring_of(1, dtype=dtype)
    ring[:, context:] = 0
    clean = draft(q, kv, context, ring)
    assert clean.isfinite().all() and clean.any()
    for how in ("nan", "ff"):
        assert torch.equal(draft(q, kv, context, poisoned(ring, context, how)), clean)
    if context:
        assert not torch.equal(draft(q, kv, context, ring_of(9, dtype=dtype)), clean)


@pytest.mark.parametrize("position", [0, 1, 126, 127, 300])
def test_target_never_reads_unwritten_rows(position: int) -> None:
    """KV-2: everything outside of the row's window may be NaN."""
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(position)).bfloat16()
    ring = ring_of(2, rows=256)
    seen = [p % 256 for p in range(max(0, position - WINDOW + 1), position + 1)]
    clean = target(q, position, ring)
    for how in ("nan", "ff"):
        dirty = poisoned(ring, 0, how)
        dirty[3, seen] = ring[3, seen]
        assert torch.equal(target(q, position, dirty), clean)
    for edge in (seen[0], seen[-1]):  # the oldest and the own row count
        changed = ring.clone()
        changed[3, edge] += 1
        assert not torch.equal(target(q, position, changed), clean)


# Slots --------------------------------------------------------------------------------------------------


def test_out_of_range_slots_write_nothing() -> None:
    """KV-5: rows of slots -1, INT_MIN, capacity, capacity + 1 and INT_MAX between valid ones."""
    ring = ring_of(3)
    slots = ids(0, *OUTSIDE, 3)
    kv = torch.randn(7, DIM, generator=torch.Generator().manual_seed(4)).bfloat16()
    positions = torch.arange(60, 67, dtype=torch.int32)
    out = CONTEXT_KV_INSERT(kv, positions, slots, ring, **CACHE)
    changed = (out != ring).any(-1).nonzero().tolist()
    assert changed == [[0, 60], [3, 66]]
    alone = CONTEXT_KV_INSERT(kv[[0, 6]], positions[[0, 6]], slots[[0, 6]], ring, **CACHE)
    assert torch.equal(out, alone)
    nothing = CONTEXT_KV_INSERT(kv[1:6], positions[1:6], slots[1:6], ring, **CACHE)
    assert torch.equal(nothing, ring)


def test_out_of_range_slots_attend_to_nothing() -> None:
    """KV-5: zeros, and the valid requests beside them keep their bits."""
    q, kv = block_inputs(7, seed=5)
    slots, positions = ids(0, *OUTSIDE, 3), ids(9, 8, 7, 6, 5, 4, 3)
    out = DRAFT_ATTENTION(q, kv, positions, slots, ring_of(6), SINK, **CACHE)
    assert not out[1:6].any()
    valid = [0, 6]
    alone = DRAFT_ATTENTION(q[valid], kv[valid], positions[valid], slots[valid], ring_of(6), SINK, **CACHE)
    assert torch.equal(out[valid], alone) and alone.flatten(1).any(1).all()
    rows = TARGET_ATTENTION(q[:, 0], positions, slots, ring_of(6), SINK, window=16, **CACHE)
    assert not rows[1:6].any() and rows[valid].flatten(1).any(1).all()


# Wrapping -----------------------------------------------------------------------------------------------


class NoRing:
    """What a ring stands for: every entry by its position, computed in numpy."""

    def __init__(self) -> None:
        self.entries: dict[int, Array] = {}

    def write(self, kv: Tensor, position: int) -> None:
        self.entries[position] = ops.rope(kv.double().numpy(), np.array(position), 8, 1e4)

    def attend(self, q: Tensor, own: list[Array], seen: range, position: int) -> Array:
        turned = ops.rope(q.double().numpy(), np.array(position), 8, 1e4)
        keys = np.array([*(self.entries[p] for p in seen), *own])
        out = ops.sink_attention(turned, keys, SINK.double().numpy())
        return ops.rope(out, np.array(position), 8, 1e4, inverse=True)


def test_draft_ring_wraps_without_losing_history() -> None:
    """KV-3: from position 126 over the wrap at 128, 100 steps of five drafts with 0, 2, 5 or a random number
    accepted. Ring and attention equal a reference without a ring; float32, 5e-6 of the values."""
    generator = torch.Generator().manual_seed(7)
    reference, ring = NoRing(), ring_of(8, slots=1, dtype=torch.float32) * torch.nan
    prompt = torch.randn(126, DIM, generator=generator)
    ring = CONTEXT_KV_INSERT(prompt, torch.arange(126).int(), torch.zeros(126).int(), ring, **PLAIN)
    for position, kv in enumerate(prompt):
        reference.write(kv, position)
    anchor = 126
    for step in range(100):
        q, own = block_inputs(1, seed=1000 + step, dtype=torch.float32)
        found = DRAFT_ATTENTION(q, own, ids(anchor), ids(0), ring, SINK, **PLAIN)
        rows = range(anchor, anchor + BLOCK)
        block = [ops.rope(own[0, i].double().numpy(), np.array(p), 8, 1e4) for i, p in enumerate(rows)]
        seen = range(max(0, anchor - WINDOW), anchor)
        for i, position in enumerate(rows):
            wanted = reference.attend(q[0, i], block, seen, position)
            assert np.abs(found[0, i].double().numpy() - wanted).max() < 5e-6
        accepted = [0, 2, 5, int(torch.randint(0, 6, (), generator=generator))][step % 4]
        context = torch.randn(1 + BLOCK, DIM, generator=generator)
        slots = torch.where(torch.arange(1 + BLOCK) <= accepted, 0, -1).int()
        positions = torch.arange(anchor, anchor + 1 + BLOCK).int()
        ring = CONTEXT_KV_INSERT(context, positions, slots, ring, **PLAIN)
        for i in range(1 + accepted):
            reference.write(context[i], anchor + i)
        anchor += 1 + accepted
        for position in range(max(0, anchor - WINDOW), anchor):
            assert np.abs(ring[0, position % WINDOW].double().numpy() - reference.entries[position]).max() < 5e-6
    assert anchor > 3 * WINDOW


@pytest.mark.parametrize("rows", [WINDOW + BLOCK + 1, 2 * WINDOW])
def test_target_ring_survives_rejected_rows(rows: int) -> None:
    """KV-3, KV-4: calls of six rows that are written and then overwritten, none, all or some accepted, through
    the smallest ring that serves them and a larger one."""
    generator = torch.Generator().manual_seed(9)
    reference, ring = NoRing(), ring_of(10, slots=1, rows=rows, dtype=torch.float32) * torch.nan
    position = 0
    for step in range(180):
        kv = torch.randn(6, DIM, generator=generator)
        q = torch.randn(6, HEADS, DIM, generator=generator)
        positions = torch.arange(position, position + 6).int()
        slots = torch.zeros(6).int()
        ring = CONTEXT_KV_INSERT(kv, positions, slots, ring, **PLAIN)
        found = TARGET_ATTENTION(q, positions, slots, ring, SINK, window=WINDOW, **PLAIN)
        for i in range(6):
            reference.write(kv[i], position + i)
        for i in range(6):
            p = position + i
            wanted = reference.attend(q[i], [], range(max(0, p - WINDOW + 1), p + 1), p)
            assert np.abs(found[i].double().numpy() - wanted).max() < 5e-6
        position += [1, 6, 1 + int(torch.randint(0, 6, (), generator=generator))][step % 3]
    assert position > 2 * rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_every_width_of_a_ring_gives_the_same_bits(dtype: torch.dtype) -> None:
    """KV-10: a window of 128 in rings of 133 rows, its paddings and others, before, at and after their wraps."""
    generator = torch.Generator().manual_seed(22)
    kv = torch.randn(600, DIM, generator=generator).to(dtype)
    queries = torch.randn(600, HEADS, DIM, generator=generator).to(dtype)
    wanted: dict[int, Tensor] = {}
    for rows in (601, 128, 133, 134, 136, 160, 192, 256):  # the first one never wraps
        ring = ring_of(23, slots=2, rows=rows, dtype=dtype) * torch.nan
        start = 0
        for position in (0, 1, 127, 128, 132, 133, 136, 255, 256, 300, 599):
            positions = torch.arange(start, position + 1).int()
            ring = CONTEXT_KV_INSERT(kv[start : position + 1], positions, torch.ones_like(positions), ring, **CACHE)
            start, q = position + 1, queries[position : position + 1]
            found = TARGET_ATTENTION(q, ids(position), ids(1), ring, SINK, window=WINDOW, **CACHE)
            assert found.isfinite().all() and torch.equal(wanted.setdefault(position, found), found), (rows, position)


def test_a_ring_that_is_too_narrow_is_refused() -> None:
    """KV-10: with the width found and what is wanted."""
    with pytest.raises(OpError, match=r"ring has 127 rows per slot, expected 128 \(the window\) or more"):
        target(torch.zeros(1, HEADS, DIM).bfloat16(), 5, ring_of(24, rows=127))


@pytest.mark.parametrize("count", [1, 128, 129, 300])
def test_long_insertion_keeps_the_last_window(count: int) -> None:
    """More rows of a slot than the ring has: what rows one after another would leave, whatever their order
    in memory, beside rows of another slot."""
    generator = torch.Generator().manual_seed(count)
    kv = torch.randn(count + 3, DIM, generator=generator).bfloat16()
    positions = torch.cat((torch.arange(50, 50 + count), torch.arange(3))).int()
    slots = torch.cat((torch.full((count,), 1), torch.full((3,), 2))).int()
    stepwise = ring_of(11)
    for i in range(count + 3):
        stepwise = CONTEXT_KV_INSERT(kv[i : i + 1], positions[i : i + 1], slots[i : i + 1], stepwise, **CACHE)
    for order in (torch.arange(count + 3), torch.randperm(count + 3, generator=generator)):
        at_once = CONTEXT_KV_INSERT(kv[order], positions[order], slots[order], ring_of(11), **CACHE)
        assert torch.equal(at_once, stepwise)


# The mask -----------------------------------------------------------------------------------------------


def ones_example(context: int, window: int, dtype: torch.dtype) -> Example:
    """Keys of ones wherever something was written, sevens elsewhere; queries that see the unrotated part."""
    q, kv = block_inputs(1, seed=12, dtype=dtype)
    q[..., -CACHE["rope_dims"] :], kv[:] = 0, 1
    ring = torch.full((1, window, DIM), 7.0).to(dtype)
    ring[:, :context] = 1
    sink = torch.full((HEADS,), -torch.inf)
    return Example("", DRAFT_ATTENTION, PLAIN, (q, kv, ids(context), ids(0), ring, sink))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("context", "window"), [(128, 128), (128, 251), (127, 128), *((c, 128) for c in range(11))])
def test_weights_of_the_valid_keys_sum_to_one(context: int, window: int, dtype: torch.dtype) -> None:
    """KV-8: values all one give exactly 1, with 133 keys of 133, 133 of 256 (0.5195 is the known wrong
    answer), and contexts of 0..10, where a causal kernel shows."""
    one = ones_example(context, window, dtype)
    nope = DIM - CACHE["rope_dims"]
    (found,) = one.run()
    assert (found[..., :nope] == 1).all()
    if dtype is not torch.bfloat16:
        # The body adds the weights in another order: one rounding of the quotient.
        assert (run_onnx(one, dtype)[0][..., :nope].float() - 1).abs().max() <= 2.0**-10


def test_every_row_of_the_block_sees_every_other() -> None:
    """KV-8: row 4's key reaches row 0, and the reverse; a slot without context sees the block alone."""
    for context in (0, 1, 5, 200):
        q, kv = block_inputs(1, seed=13)
        before = draft(q, kv, context, ring_of(14))
        for changed in range(BLOCK):
            other = kv.clone()
            other[0, changed] *= -1
            moved = (draft(q, other, context, ring_of(14)) != before).flatten(2).any(-1)[0]
            assert moved.all(), f"context {context}: key {changed} reached rows {moved.tolist()}"


def test_invalid_keys_change_nothing() -> None:
    """KV-8: other slots, and ring rows that have not been written, at every context up to the window."""
    q, kv = block_inputs(1, seed=15)
    for context in (0, 1, 2, 10, 64, 127, 128, 500):
        ring = ring_of(16)
        before = draft(q, kv, context, ring)
        other = ring_of(17)
        other[1, :context] = ring[1, :context]
        assert torch.equal(draft(q, kv, context, other), before)
        if context:
            last = ring.clone()
            last[1, (context - 1) % WINDOW] *= -1
            assert not torch.equal(draft(q, kv, context, last), before), "the newest context row is not seen"


def test_requests_see_their_own_slot_and_block() -> None:
    """Neighbouring requests of one call share nothing, also with the same slot twice."""
    q, kv = block_inputs(3, seed=18)
    ring, positions, slots = ring_of(19), ids(40, 128, 7), ids(2, 0, 2)
    together = DRAFT_ATTENTION(q, kv, positions, slots, ring, SINK, **CACHE)
    for r in range(3):
        part = slice(r, r + 1)
        alone = DRAFT_ATTENTION(q[part], kv[part], positions[part], slots[part], ring, SINK, **CACHE)
        assert torch.equal(together[part], alone)


def test_key_blocks_follow_ring_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec 10.7: blocks of 64 run in ring order, draft rows last, and the last block is the partial one."""
    seen: dict[str, Tensor] = {}

    def spy(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
        seen.update(keys=keys, valid=valid)
        return sink_attention(q, keys, valid, sink)

    monkeypatch.setattr(draft_attention, "sink_attention", spy)
    q, kv = block_inputs(1, seed=20)
    ring = ring_of(21)
    DRAFT_ATTENTION(q, kv, ids(300), ids(1), ring, SINK, **PLAIN)
    assert seen["keys"].shape == (BLOCK, WINDOW + BLOCK, DIM) and seen["valid"].all()
    assert torch.equal(seen["keys"][0, :WINDOW], ring[1])
    assert torch.equal(seen["keys"][0, WINDOW:, : DIM - 8], kv[0, :, : DIM - 8])
