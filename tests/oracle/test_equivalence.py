"""One computation, several ways to cut it: ranks, chunks, batches, padding, ring wraps.

On a CPU the products of 16-bit and 8-bit numbers are summed in float64, so a row does not depend on the rows
beside it: in ``released`` numerics, and dequantised to bfloat16, the cuts below must agree to the last bit.
Float32 networks sum in float32 and agree within :data:`FLOAT32`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.plugins.mhc_all_reduce import MhcAllReduce, MhcAllReduceResidualOnly
from torch import Tensor

from tests.configs import VARIANTS, TinyCheckpoint, ids, target_rings
from tests.oracle.comparison import DraftPass, agree, draft_pass, feed, run_passes, sequence, share_moved, two_steps

Tiny = Callable[..., TinyCheckpoint]
EXACT_MODES = [None, torch.bfloat16]
MODES = [*EXACT_MODES, torch.float32]
MODE_IDS = {None: "released", torch.bfloat16: "bfloat16", torch.float32: "float32"}

modes = pytest.mark.parametrize("dtype", MODES, ids=MODE_IDS.get)
exact_modes = pytest.mark.parametrize("dtype", EXACT_MODES, ids=MODE_IDS.get)
variants = pytest.mark.parametrize("variant", VARIANTS)


# Chunks, decoding, rejected rows ------------------------------------------------------------------------


@variants
@modes
@pytest.mark.parametrize("chunks", [[24, 24, 24], [1] * 72, [5, 40, 27]], ids=["thirds", "single rows", "odd"])
def test_chunked_prefill_equals_one_call(
    tiny: Tiny, variant: str, dtype: torch.dtype | None, chunks: list[int]
) -> None:
    """Logits, features and rings of 72 rows (over two windows) in one call and in pieces."""
    model, tokens = tiny(variant).target(dtype), sequence(72, seed=2)
    logits, features, rings = feed(model, tokens, 0, 1, target_rings(model, 2, rows=104))
    found, pieces, start = [], target_rings(model, 2, rows=104), 0
    for size in chunks:
        one, two, pieces = feed(model, tokens[start : start + size], start, 1, pieces)
        found.append((one, two))
        start += size
    agree([torch.cat([f[i] for f in found]) for i in (0, 1)], [logits, features], dtype)
    agree(pieces, rings, dtype)


@variants
@exact_modes
def test_decoding_with_rejected_drafts_equals_recomputation(
    tiny: Tiny, variant: str, dtype: torch.dtype | None
) -> None:
    """KV-3, KV-4: steps of an anchor and five drafts, 0, 5 or a random number right, with the smallest ring
    that serves them (W + 6). Each accepted row has the bits that one prefill of the final text gives it."""
    checkpoint = tiny(variant)
    model, tokens = checkpoint.target(dtype), sequence(110, seed=3)
    wanted, wanted_features, _ = feed(model, tokens, 0, 0, target_rings(model, 1, rows=142))
    rings = target_rings(model, 1, rows=checkpoint.keys["sliding_window"] + 6)
    found, features, rings = feed(model, tokens[:6], 0, 0, rings)
    agree([found, features], [wanted[:6], wanted_features[:6]], None)
    generator, done, steps = torch.Generator().manual_seed(4), 6, 0
    while done + 6 <= len(tokens):
        right = [0, 5, int(torch.randint(0, 6, (), generator=generator))][steps % 3]
        rows = tokens[done : done + 6].clone()
        rows[1 + right :] = (rows[1 + right :] + 1) % 319  # drafts that the target would not have said
        found, features, rings = feed(model, rows, done, 0, rings)
        kept = slice(done, done + 1 + right)
        agree([found[: 1 + right], features[: 1 + right]], [wanted[kept], wanted_features[kept]], None)
        done, steps = done + 1 + right, steps + 1
    assert steps > 20


@variants
@exact_modes
def test_ring_smaller_than_a_step_needs_is_seen(tiny: Tiny, variant: str, dtype: torch.dtype | None) -> None:
    """The comparison above fails when rejected rows overwrite history: a ring of W + 4 for steps of six."""
    checkpoint = tiny(variant)
    model, tokens = checkpoint.target(dtype), sequence(60, seed=3)
    wanted, *_ = feed(model, tokens, 0, 0, target_rings(model, 1, rows=92))
    rings = target_rings(model, 1, rows=checkpoint.keys["sliding_window"] + 4)
    for start in range(0, 54, 6):
        found, _, rings = feed(model, tokens[start : start + 6], start, 0, rings)
    assert not torch.equal(found, wanted[48:54])


@variants
@exact_modes
def test_draft_context_in_one_call_equals_row_by_row(tiny: Tiny, variant: str, dtype: torch.dtype | None) -> None:
    """KV-3: 40 positions through rings of 32, at once (only the last 32 stay) and one at a time."""
    checkpoint = tiny(variant)
    model = checkpoint.draft(dtype)
    whole = draft_pass(checkpoint, {3: range(40)}, seed=5)
    rows = [
        DraftPass(
            whole.anchors, ids(p + 1), whole.slots, whole.features[p : p + 1], ids(p), whole.feature_slots[p : p + 1]
        )
        for p in range(40)
    ]
    agree(run_passes(model, rows), run_passes(model, [whole]), None)


@variants
@exact_modes
def test_rejected_rows_leave_no_trace_in_the_draft(tiny: Tiny, variant: str, dtype: torch.dtype | None) -> None:
    """KV-3: the same steps with and without rows of slot -1 after the accepted ones."""
    checkpoint = tiny(variant)
    model = checkpoint.draft(dtype)
    passes = two_steps(checkpoint)
    accepted = []
    for one in passes:
        kept = one.feature_slots >= 0
        assert kept.all() == (one is passes[0])
        accepted.append(
            DraftPass(
                one.anchors,
                one.positions,
                one.slots,
                one.features[kept],
                one.feature_positions[kept],
                one.feature_slots[kept],
            )
        )
    agree(run_passes(model, passes), run_passes(model, accepted), None)


# Batches and padding ------------------------------------------------------------------------------------

CONTEXTS = {
    5: range(1),
    0: range(7),
    3: range(31),
    1: range(32),
    7: range(40, 73),
    2: range(0),
    6: range(95, 130),
    4: range(9),
}


def select(one: DraftPass, requests: list[int], contexts: dict[int, range]) -> DraftPass:
    """The given requests of a pass, in that order."""
    slots = [list(contexts)[r] for r in requests]
    rows = torch.cat([torch.where(one.feature_slots == slot)[0] for slot in slots])
    return DraftPass(
        one.anchors[requests],
        one.positions[requests],
        one.slots[requests],
        one.features[rows],
        one.feature_positions[rows],
        one.feature_slots[rows],
    )


@variants
@exact_modes
def test_draft_of_one_request_does_not_depend_on_the_others(
    tiny: Tiny, variant: str, dtype: torch.dtype | None
) -> None:
    """Eight requests at once, each alone, and all in another order; one of them without any context."""
    checkpoint = tiny(variant)
    model = checkpoint.draft(dtype)
    one = draft_pass(checkpoint, CONTEXTS, seed=6)
    together = run_passes(model, [one], slots=8)
    for request, slot in enumerate(CONTEXTS):
        alone = run_passes(model, [select(one, [request], CONTEXTS)], slots=8)
        agree(alone[:3], [t[request : request + 1] for t in together[:3]], None)
        agree([ring[slot] for ring in alone[3:]], [ring[slot] for ring in together[3:]], None)
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    shuffled = run_passes(model, [select(one, order, CONTEXTS)], slots=8)
    agree(shuffled[:3], [t[order] for t in together[:3]], None)
    agree(shuffled[3:], together[3:], None)


@variants
@exact_modes
def test_target_rows_do_not_depend_on_other_requests(tiny: Tiny, variant: str, dtype: torch.dtype | None) -> None:
    """Eight requests of one to sixteen rows in one call against eight calls."""
    model = tiny(variant).target(dtype)
    texts = {slot: sequence(1 + 2 * slot, seed=slot) for slot in (4, 0, 7, 2, 6, 1, 5, 3)}
    rows = torch.cat([torch.arange(len(t)) for t in texts.values()]).int()
    slots = torch.cat([torch.full((len(t),), slot) for slot, t in texts.items()]).int()
    with torch.no_grad():
        logits, features, rings = model(torch.cat(list(texts.values())), rows, slots, target_rings(model, 8))
    for slot, text in texts.items():
        alone = feed(model, text, 0, slot, target_rings(model, 8))
        agree(alone[:2], [logits[slots == slot], features[slots == slot]], None)
        agree([ring[slot] for ring in alone[2]], [ring[slot] for ring in rings], None)


@variants
@exact_modes
def test_padding_left_over_from_a_larger_batch_writes_nothing(
    tiny: Tiny, variant: str, dtype: torch.dtype | None
) -> None:
    """KV-6: a step of eight requests, then one request padded to eight with everything of the old step still
    in place but the slots, which are -1. The other requests' bytes stay, and the request's result is its own."""
    checkpoint = tiny(variant)
    model = checkpoint.draft(dtype)
    before = draft_pass(checkpoint, CONTEXTS, seed=7)
    live = 3
    slot = list(CONTEXTS)[live]
    after = draft_pass(checkpoint, {slot: range(CONTEXTS[slot].stop, CONTEXTS[slot].stop + 2)}, seed=8)

    def padded(fresh: Tensor, stale: Tensor, *, slots: bool = False) -> Tensor:
        rest = stale[len(fresh) :]
        return torch.cat((fresh, torch.full_like(rest, -1) if slots else rest))

    stale = DraftPass(
        padded(after.anchors, before.anchors),
        padded(after.positions, before.positions),
        padded(after.slots, before.slots, slots=True),
        padded(after.features, before.features),
        padded(after.feature_positions, before.feature_positions),
        padded(after.feature_slots, before.feature_slots, slots=True),
    )
    alone, filled = (run_passes(model, [before, one], slots=8) for one in (after, stale))
    agree([t[:1] for t in filled[:3]], alone[:3], None)
    agree(filled[3:], alone[3:], None)
    untouched = run_passes(model, [before], slots=8)[3:]
    others = [s for s in range(8) if s != slot]
    agree([ring[others] for ring in filled[3:]], [ring[others] for ring in untouched], None)
    for value in filled[:3]:
        assert value.isfinite().all(), "a padding row computed NaN"
    assert ((filled[0] >= 0) & (filled[0] < checkpoint.keys["vocab_size"])).all()


@variants
@exact_modes
def test_padding_rows_of_the_target_write_nothing(tiny: Tiny, variant: str, dtype: torch.dtype | None) -> None:
    """KV-6: rows of slot -1 after, between and before the rows of a request."""
    model, tokens = tiny(variant).target(dtype), sequence(10, seed=9)
    alone = feed(model, tokens, 0, 1, target_rings(model, 3))
    slots = ids(-1, *[1] * 4, -1, -1, *[1] * 6, -1)
    real = slots >= 0
    rows, text = torch.full((14,), 5, dtype=torch.int32), torch.full((14,), 17, dtype=torch.int32)
    rows[real], text[real] = torch.arange(10, dtype=torch.int32), tokens
    with torch.no_grad():
        logits, features, rings = model(text, rows, slots, target_rings(model, 3))
    agree([logits[real], features[real], *rings], [*alone[:2], *alone[2]], None)
    assert logits.isfinite().all() and features.isfinite().all()


# Feature capture, modes ---------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("captured", [[1, 2, 3], [0], [3, 0]])
def test_capture_takes_the_streams_of_its_variant(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, variant: str, captured: list[int]
) -> None:
    """POS-6: on a target whose streams leave layer k as the constant k + 1, V4 captures k + 1 and V4.1 k."""
    model = tiny(variant, dspark_target_layer_ids=captured).target(torch.float32)
    model.embed.weight.zero_()

    def half_a_step(self: Any, attributes: Any, partial: Tensor, streams: Tensor, *_: Tensor) -> Any:
        out = streams + 0.5
        return (out, out[:, 0], out[:, 0]) if isinstance(self, MhcAllReduce) else out

    for op in (MhcAllReduce, MhcAllReduceResidualOnly):
        monkeypatch.setattr(op, "reference", half_a_step)
    _, features, _ = feed(model, sequence(4, seed=0), 0, 0, target_rings(model, 1))
    shift = 1 if variant == "v4" else 0
    assert features.unflatten(-1, (len(captured), -1)).unique(dim=-1)[0].flatten().tolist() == [
        layer + shift for layer in captured
    ]


@variants
def test_distance_between_the_modes_is_measured(
    tiny: Tiny, variant: str, record_property: Callable[[str, object], None]
) -> None:
    """Released against dequantised float32, target and draft: reported, and neither nothing nor everything.

    Activations rounded to three mantissa bits cost a few percent a layer; random weights amplify it.
    """
    checkpoint, tokens = tiny(variant), sequence(64, seed=10)
    results = {}
    for dtype in (None, torch.float32):
        target, draft = checkpoint.target(dtype), checkpoint.draft(dtype)
        logits, features, _ = feed(target, tokens, 0, 0, target_rings(target, 1, rows=96))
        results[dtype] = [logits, features.float(), run_passes(draft, two_steps(checkpoint))[2][:, 0]]
    for name, released, wide in zip(("logits", "features", "draft logits"), *results.values(), strict=True):
        moved = share_moved(released, wide)
        record_property(f"{name}: released to dequantized, rms share", moved)
        print(f"{variant} {name}: released is {moved:.3f} of the rms away from dequantized")
        assert 5e-3 < moved < 0.3
