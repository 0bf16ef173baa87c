"""The mailbox protocol on one GPU: every rank is a stream, its region ordinary memory of the same GPU.

Stores go through the same instructions as between GPUs; what this can't show is NVLink and IPC.
"""

from __future__ import annotations

import pytest
import torch
from dspark_trt.plugins import mhc_all_reduce as layout
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE

from tests.gpu.kernel_call import KernelCall
from tests.gpu.mailbox_cases import EPS, KINDS, Case, Regions
from tests.op_examples import UNQUANTIZED

pytestmark = pytest.mark.gpu


class Ranks(Regions):
    """The ranks of boundaries."""

    def cases(self, kind: str, seed: int, rows: int, residual: bool) -> list[Case]:
        shape = (rows, self.hidden)
        return [Case(table, r, kind, seed, shape, self.dtype, residual) for r, table in enumerate(self.tables)]

    def assert_at_rest(self, calls: int) -> None:
        for rank in range(len(self.regions)):
            assert bool((self.slots(rank) == torch.iinfo(self.integer).min).all()), "a slot was not emptied"
            found = {n: int(self.word(rank, n)) for n in ("generation", "fault", "arrived")}
            assert found == {"generation": calls % layout.MAILBOX_GENERATIONS, "fault": 0, "arrived": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("ranks", "hidden"), [(2, 5120), (4, 256), (8, 1032)])
def test_ranks_as_streams(ranks: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    """TP-1, TP-2, TP-4: every rank has the bits of the rank-ordered sum, whatever is published."""
    job = Ranks(ranks, hidden, dtype)
    queue = [
        job.cases(KINDS[i % len(KINDS)], seed + i, rows, residual=i % 3 == 2)
        for i, rows in enumerate((5, 1, 7, 2, 16, 3, 12, 1, 9, 4))
    ]
    torch.cuda.synchronize()
    # All calls are in flight at once: ranks drift apart as far as the protocol lets them.
    for _ in range(3):
        for cases in queue:
            job.launch([case.fused for case in cases])
    torch.cuda.synchronize()
    job.assert_at_rest(3 * len(queue))
    for cases in queue:
        for case in cases:
            case.check()


def test_more_rows_than_fit_on_the_device_at_once(seed: int) -> None:
    """TP-5: 256 rows per rank; blocks take their rows in turns and never wait for blocks that can't start."""
    job = Ranks(2, 5120, torch.bfloat16)
    cases = job.cases("normal", seed, layout.MAILBOX_ROWS, residual=False)
    torch.cuda.synchronize()
    job.launch([case.fused for case in cases])
    torch.cuda.synchronize()
    job.assert_at_rest(1)
    for case in cases:
        case.check()


def test_a_silent_peer_costs_its_timeout_once(seed: int) -> None:
    """TP-11: the kernel gives up and says which rank it missed; later calls don't wait at all."""
    job = Ranks(2, 256, torch.bfloat16, timeout_ms=300)
    cases = job.cases("normal", seed, 3, residual=False)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        cases[0].fused.launch()
    end.record()
    torch.cuda.synchronize()
    assert int(job.word(0, "fault")) == layout.MAILBOX_SILENT_RANK + 1
    assert 300 <= start.elapsed_time(end) < 900


def test_a_mailbox_of_another_width_is_noticed(seed: int) -> None:
    """TP-5: the kernel gives up at once and publishes nothing."""
    job = Ranks(2, 512, torch.bfloat16)
    other = Ranks(2, 256, torch.bfloat16).cases("normal", seed, 3, residual=False)[0].fused
    before = [job.slots(r).clone() for r in range(2)]
    KernelCall(MHC_ALL_REDUCE, [*other.inputs[:-1], job.tables[0]], tp_size=2, norm_eps=EPS, **UNQUANTIZED).run()
    assert int(job.word(0, "fault")) == layout.MAILBOX_MISFIT
    assert all(torch.equal(job.slots(r), before[r]) for r in range(2))
