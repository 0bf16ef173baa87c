"""Tensor parallel networks, their ranks as threads in lock-step, against one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dspark_trt.plugins import mhc_all_reduce
from torch import Tensor

from tests.configs import TinyCheckpoint, target_rings
from tests.oracle.comparison import agree, feed, run_passes, sequence, share_moved, two_steps
from tests.oracle.lockstep import run_ranks

Tiny = Callable[..., TinyCheckpoint]


def sharded_target(
    checkpoint: TinyCheckpoint, tp_size: int, dtype: torch.dtype | None, tokens: Tensor
) -> list[list[Tensor]]:
    checkpoint.shards(tp_size)

    def work(rank: int) -> list[Tensor]:
        model = checkpoint.target(dtype, tp_size=tp_size, rank=rank)
        mailbox = torch.zeros(tp_size, 2, dtype=torch.int32) if tp_size > 1 else None
        logits, features, rings = feed(model, tokens, 0, 0, target_rings(model, 1, rows=80), mailbox)
        return [logits, features, *rings]

    return run_ranks(tp_size, work)


def sharded_draft(checkpoint: TinyCheckpoint, tp_size: int, dtype: torch.dtype | None) -> list[list[Tensor]]:
    checkpoint.shards(tp_size)

    def work(rank: int) -> list[Tensor]:
        model = checkpoint.draft(dtype, tp_size=tp_size, rank=rank)
        mailbox = torch.zeros(tp_size, 2, dtype=torch.int32) if tp_size > 1 else None
        return run_passes(model, two_steps(checkpoint), mailbox=mailbox)

    return run_ranks(tp_size, work)


SPLITS = [("v4", 2), ("v4.1", 2), ("v4.1", 4)]


@pytest.mark.parametrize(("variant", "tp_size"), SPLITS)
@pytest.mark.parametrize("network", ["draft", "target"])
def test_ranks_together_compute_what_one_computes(tiny: Tiny, variant: str, tp_size: int, network: str) -> None:
    """TP 1 against TP 2 and 4 in float32; all ranks hold the same bits."""
    checkpoint = tiny(variant)
    run = (
        sharded_draft if network == "draft" else lambda c, tp, dtype: sharded_target(c, tp, dtype, sequence(48, seed=1))
    )
    (whole,), shards = run(checkpoint, 1, torch.float32), run(checkpoint, tp_size, torch.float32)
    for shard in shards[1:]:
        agree(shard, shards[0], None)
    agree(shards[0], whole, torch.float32)


@pytest.mark.parametrize(("variant", "tp_size"), SPLITS)
def test_released_ranks_hold_the_same_bits(
    tiny: Tiny, variant: str, tp_size: int, record_property: Callable[[str, object], None]
) -> None:
    """SMP-9: every rank drafts the same tokens. How far the rounding of partial sums to bf16 moves the draft
    away from one rank's result is measured; the bound is the distance between the modes themselves."""
    checkpoint = tiny(variant)
    (whole,), shards = sharded_draft(checkpoint, 1, None), sharded_draft(checkpoint, tp_size, None)
    for shard in shards[1:]:
        agree(shard, shards[0], None)
    # Slot 0: later slots follow their predecessors' tokens, and one near tie would decide the number.
    moved = share_moved(shards[0][2][:, 0], whole[2][:, 0])
    record_property(f"released draft logits, TP 1 to TP {tp_size}, rms share", moved)
    print(f"{variant}: released draft logits move by {moved:.3f} of their rms from TP 1 to TP {tp_size}")
    assert moved < 0.3
    agree(shards[0][3:4], whole[3:4], None)  # the first ring is replicated arithmetic


@pytest.mark.parametrize("fault", ["missing rank", "rank twice"])
def test_a_wrong_sum_over_ranks_is_seen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The float32 comparison turns red when a partial sum is lost or counted twice."""
    checkpoint = tiny("v4.1")
    (whole,) = sharded_draft(checkpoint, 1, torch.float32)
    right = mhc_all_reduce.reduce_ranks
    wrong = (lambda p: right(p[:1])) if fault == "missing rank" else (lambda p: right(torch.cat((p, p[:1]))))
    monkeypatch.setattr(mhc_all_reduce, "reduce_ranks", wrong)
    shards = sharded_draft(checkpoint, 2, torch.float32)
    with pytest.raises(AssertionError):
        agree(shards[0], whole, torch.float32)


def test_sharded_network_outside_a_scope_says_so(tiny: Tiny) -> None:
    model = tiny("v4.1").target(torch.float32, tp_size=2)
    with pytest.raises(RuntimeError, match=r"sharded over 2 ranks ran outside collective_scope"):
        feed(model, sequence(3, 0), 0, 0, target_rings(model, 1), torch.zeros(2, 2, dtype=torch.int32))
