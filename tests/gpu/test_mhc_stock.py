"""The stock way between two GPUs, one process each, beside the fused one: NCCL, then one-rank operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.plugins.op import executor_scope
from dspark_trt.runtime_py.boundary import FUSED_MHC_MAX_ROWS, Facts, Route, plan
from dspark_trt.runtime_py.mailbox import Mailbox
from dspark_trt.runtime_py.stock import boundary_scope, open_group, stock_executor
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits
from tests.gpu.mailbox_cases import Case
from tests.gpu.test_mhc_two_gpus import HIDDEN
from tests.gpu.two_ranks import StoreCommunicator, run_ranks

pytestmark = pytest.mark.gpu2

STREAMS, NORM = {"rtol": 0.008, "atol": 1e-6}, {"rtol": 0.008, "atol": 0.008}
"""Spec 8.2, all-reduce and boundary: bounds of streams and of normed rows."""


def outputs_of(call: KernelCall) -> tuple[Tensor, ...]:
    """A call by whatever executor is in force."""
    out = call.op(*call.inputs, **dataclasses.asdict(call.attributes))
    return out if isinstance(out, tuple) else (out,)


def _both_ways(communicator: StoreCommunicator, seed: int) -> list[str]:
    rank, device = communicator.rank, torch.device("cuda", communicator.rank)
    group = open_group(communicator, device)
    problems: list[str] = []

    def compare(label: str, found: tuple[Tensor, ...], wanted: list[Tensor], exact: int) -> None:
        for i, (f, w) in enumerate(zip(found, wanted, strict=True)):
            bounds = NORM if i == 2 else STREAMS
            if not torch.allclose(f.float(), w.float(), **bounds):
                problems.append(f"{label}: output {i} is out of bounds")
            # Two summands have one order, so that even the bits are equal up to the norm.
            if i < exact and not torch.equal(bits(f), bits(w)):
                problems.append(f"{label}: output {i} has other bits")
        digest = [int(bits(f).long().sum()) for f in found]
        if any(other != digest for other in communicator.all_gather_object(digest)):
            problems.append(f"{label}: ranks have different bits")

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        box = Mailbox.create(communicator, HIDDEN, dtype, device)
        for number, rows in enumerate((1, 5, 40, FUSED_MHC_MAX_ROWS)):
            for residual in (False, True):
                case = Case(box.tensor, rank, "normal", seed + number, (rows, HIDDEN), dtype, residual)
                wanted = case.fused.run()
                with executor_scope(stock_executor(group.all_reduce)):
                    found = outputs_of(case.fused)
                compare(case.label, found, wanted, exact=2)
        _beyond_the_mailbox(communicator, box, seed, dtype, group.all_reduce, problems)
        if dtype == torch.bfloat16:
            _captured(box, rank, seed, group.all_reduce, problems)
        box.check()
        box.close()
    communicator.barrier()
    group.close()
    return problems


def _beyond_the_mailbox(
    communicator: StoreCommunicator,
    box: Mailbox,
    seed: int,
    dtype: torch.dtype,
    all_reduce: Callable[[Tensor], Tensor],
    problems: list[str],
) -> None:
    """One row more than the mailbox holds: the scope goes the stock way, where the fused one would be refused."""
    facts = Facts.gather(communicator, dtype)
    rows = FUSED_MHC_MAX_ROWS + 1
    case = Case(box.tensor, communicator.rank, "normal", seed, (rows, HIDDEN), dtype, residual=True)
    with boundary_scope(facts, all_reduce):
        (found,) = outputs_of(case.fused)
    if plan(rows, facts).route is not Route.STOCK or not torch.equal(bits(found), bits(case.expected[0])):
        problems.append(f"{case.label}: not the sum, or not the stock way")


def _captured(box: Mailbox, rank: int, seed: int, all_reduce: Callable[[Tensor], Tensor], problems: list[str]) -> None:
    """GR-1, GR-4: captured after one plain call, replayed on data that the capture never saw."""
    case = Case(box.tensor, rank, "normal", seed, (5, HIDDEN), torch.bfloat16, residual=True)
    graph, partial = torch.cuda.CUDAGraph(), case.fused.inputs[0]
    with executor_scope(stock_executor(all_reduce)):
        outputs_of(case.fused)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            replayed = outputs_of(case.fused)
        partial.mul_(-3)
        graph.replay()
        torch.cuda.synchronize()
        eager = outputs_of(case.fused)
    if not torch.equal(bits(replayed[0]), bits(eager[0])):
        problems.append("a replay differs from the eager call")


@pytest.mark.timeout(240)
def test_stock_and_fused_agree(seed: int) -> None:
    """Bounds of spec 8.2 for the norm; streams and hidden rows of two ranks to the bit; every rank the same bits."""
    reports: dict[int, Any] = run_ranks(_both_ways, seed, 200)
    assert reports == {0: [], 1: []}
