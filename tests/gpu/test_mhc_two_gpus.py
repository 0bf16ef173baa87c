"""The fused all-reduce between two GPUs, one process each."""

from __future__ import annotations

import time

import pytest
import torch
from dspark_trt.plugins import mhc_all_reduce as layout
from dspark_trt.runtime_py.mailbox import Mailbox, slot_bytes

from tests.gpu.kernel_call import bits
from tests.gpu.mailbox_cases import KINDS, Case, values_that_differ_in_100_000_calls
from tests.gpu.two_ranks import RANKS, Report, StoreCommunicator, check_survivor, lose_a_peer, run_ranks

pytestmark = pytest.mark.gpu2

HIDDEN = 5120


def assert_all_slots_empty(communicator: StoreCommunicator, box: Mailbox, dtype: torch.dtype) -> None:
    torch.cuda.synchronize()
    communicator.barrier()
    raw = box._memory.read(box._own + layout.MAILBOX_HEADER_BYTES, slot_bytes(RANKS, HIDDEN, dtype))
    communicator.barrier()
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    slots = torch.frombuffer(bytearray(raw), dtype=integer)
    assert bool((slots == torch.iinfo(integer).min).all())


def _every_payload(communicator: StoreCommunicator, seed: int) -> Report:
    rank, start = communicator.rank, time.monotonic()
    times = {}
    for late, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        box = Mailbox.create(communicator, HIDDEN, dtype, torch.device("cuda", rank))
        # The first call, with no other meeting after the set-up, while one rank is late.
        first = Case(box.tensor, rank, "normal", seed, (5, HIDDEN), dtype, residual=False)
        if rank == late % 2:
            time.sleep(2)
        first.run()
        number = seed
        for rows in (*range(1, 17), 40, 64, layout.MAILBOX_ROWS):
            for kind in KINDS if rows in (3, 40) else KINDS[number % 2 :: 2]:
                number += 1
                Case(box.tensor, rank, kind, number, (rows, HIDDEN), dtype, residual=number % 3 == 0).run()
        _beyond_capacity(box, rank, seed, dtype)
        if dtype == torch.bfloat16:
            times["one by one"] = time.monotonic() - start
            wrong = values_that_differ_in_100_000_calls(box, rank, seed, HIDDEN)
            assert wrong == 0, f"{wrong} values differ in 100,000 calls, seed {seed}"
            times["100,000"] = time.monotonic() - start
        box.check()
        assert_all_slots_empty(communicator, box, dtype)
        box.close()
    communicator.barrier()
    return {**times, "all": time.monotonic() - start}


def _beyond_capacity(box: Mailbox, rank: int, seed: int, dtype: torch.dtype) -> None:
    """TP-6."""
    case = Case(box.tensor, rank, "normal", seed, (1, HIDDEN), dtype, residual=False)
    fused = case.fused
    fused.sizes["rows"] = layout.MAILBOX_ROWS + 1
    with pytest.raises(RuntimeError, match="more rows than the mailbox holds"):
        fused.launch()
    torch.cuda.synchronize()
    assert all((bits(t) == -1).all() for t in fused.outputs)
    fused.sizes["rows"] = 1
    case.run()


@pytest.mark.timeout(180)
def test_every_payload_row_count_and_order(seed: int) -> None:
    """TP-1, TP-2, TP-3, TP-4, TP-6, TP-7, TP-9: every rank has the bits of the rank-ordered sum; no slot stays full."""
    reports = run_ranks(_every_payload, seed, 150)
    print(reports)
    assert set(reports) == {0, 1}


def _lose_a_peer(communicator: StoreCommunicator, seed: int) -> Report:
    rank, dtype = communicator.rank, torch.bfloat16
    box = Mailbox.create(communicator, HIDDEN, dtype, torch.device("cuda", rank), timeout_s=1.5)
    cases = [Case(box.tensor, rank, "normal", seed + i, (5, HIDDEN), dtype, residual=False) for i in range(6)]
    for case in cases[:5]:
        case.run()
    return lose_a_peer(communicator, box, [case.launch for case in cases])


@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_other_in_bounded_time(seed: int) -> None:
    """TP-11: six calls wait once, not six times."""
    check_survivor(_lose_a_peer, seed)
