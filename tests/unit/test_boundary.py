"""The way of a boundary, fused or stock: one decision for all ranks, and two ways that agree."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from dspark_trt.plugins.mhc_all_reduce import MAILBOX_ROWS, reduce_ranks
from dspark_trt.plugins.op import Op, OpExecutor, executor_scope
from dspark_trt.runtime_py import stock
from dspark_trt.runtime_py.boundary import FUSED_MHC_MAX_ROWS, BoundaryError, Facts, Route, plan
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.stock import HostGroup, StockError, boundary_scope, stock_executor
from torch import Tensor

from tests.op_examples import LABELS, Example, example
from tests.thread_ranks import outcomes

NODE = Facts(ranks=4, nodes=1, dtype=torch.bfloat16, mailbox_problem="")
BOUNDARIES = [label for label in LABELS if label.startswith("MhcAllReduce")]
STREAMS, NORM = {"rtol": 0.008, "atol": 1e-6}, {"rtol": 0.008, "atol": 0.008}
"""Spec 8.2, all-reduce and boundary fused by others: bounds of streams and of normed rows."""


# The decision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "facts", "route", "reason"),
    [
        (1, NODE, Route.FUSED, "1 rows fit the mailbox of 4 ranks"),
        (FUSED_MHC_MAX_ROWS, NODE, Route.FUSED, "256 rows fit"),
        (FUSED_MHC_MAX_ROWS + 1, NODE, Route.STOCK, "257 rows are more than the 256 of the mailbox"),
        (5, Facts(4, 2, torch.bfloat16, ""), Route.STOCK, "2 nodes share no memory"),
        (5, Facts(4, 1, torch.float64, ""), Route.STOCK, "does not carry torch.float64"),
        (5, Facts(6, 1, torch.bfloat16, ""), Route.STOCK, "made for 2, 4 or 8 ranks, not 6"),
        (5, Facts(2, 1, torch.bfloat16, "rank 1: no peer"), Route.STOCK, "no mailbox: rank 1: no peer"),
        (10**6, Facts(1, 1, torch.float64, "none"), Route.FUSED, "one rank has nothing to exchange"),
    ],
)
def test_plan(rows: int, facts: Facts, route: Route, reason: str) -> None:
    """TP-5, TP-6: capacity is the last fused row count; every reason is told in one line."""
    found = plan(rows, facts)
    assert found.route is route and re.search(reason, found.reason) and "\n" not in found.reason


def test_limit_is_the_capacity_of_the_mailbox() -> None:
    """TP-6: a fused call beyond it would be refused by the kernel, on every rank, in the middle of a step."""
    assert FUSED_MHC_MAX_ROWS == MAILBOX_ROWS


def test_one_rank_without_peer_access_sends_all_ranks_the_stock_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP-8: what only rank 2 met decides for everyone, with the same words."""
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    problems = ["", "", "cudaIpcOpenMemHandle failed with error 101", ""]
    facts = outcomes(4, lambda c: Facts.gather(c, torch.bfloat16, problems[c.rank]))
    assert len(set(facts)) == 1 and facts[0].mailbox_problem == f"rank 2: {problems[2]}"
    plans = {plan(rows, one) for one in facts for rows in (1, 40, 256)}
    assert {p.route for p in plans} == {Route.STOCK} and len(plans) == 1


def test_hosts_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "a", 1: "a", 2: "b", 3: "b"}
    own = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: names[own.rank])

    def gather(communicator: Any) -> Facts:
        own.rank = communicator.rank
        return Facts.gather(communicator, torch.float16)

    facts = outcomes(4, gather)
    assert set(facts) == {Facts(4, 2, torch.float16, "")}


def test_the_plan_asks_for_nothing_of_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 17: with host name, environment, devices and memory out of reach the plans are the same."""
    cases = [(rows, f) for rows in (0, 5, 256, 257) for f in (NODE, Facts(4, 3, torch.bfloat16, ""))]
    before = [plan(*case) for case in cases]

    def out_of_reach(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    asked = [(socket, "gethostname"), (os, "getenv"), (os, "getpid")]
    asked += [(torch.cuda, name) for name in ("is_available", "mem_get_info", "device_count", "current_device")]
    with monkeypatch.context() as patch:
        for owner, name in asked:
            patch.setattr(owner, name, out_of_reach)
        again = [plan(*case) for case in cases]
    assert again == before


def test_ranks_of_different_activations_are_refused_alike() -> None:
    dtypes = [torch.bfloat16, torch.float16]
    errors = outcomes(2, lambda c: Facts.gather(c, dtypes[c.rank]))
    assert all(isinstance(e, BoundaryError) for e in errors) and len({str(e) for e in errors}) == 1
    assert "rank 0 torch.bfloat16, rank 1 torch.float16; expected one" in str(errors[0])


# The two ways -------------------------------------------------------------------------------------------


def shares(one: Example, tp_size: int) -> Tensor:
    """Partial sums of every rank, of very different sizes, one with -0.0 and one with a NaN row."""
    generator = torch.Generator().manual_seed(tp_size)
    partial = one.tensors[0]
    parts = torch.randn(tp_size, *partial.shape, generator=generator)
    parts *= torch.where(torch.rand(parts.shape, generator=generator) < 0.5, 2.0**6, 2.0**-8)
    parts[0, :, ::3] = -0.0
    parts[-1, 1] = torch.nan
    return parts.to(partial.dtype)


def on_rank(one: Example, parts: Tensor, rank: int) -> Example:
    tensors = (parts[rank], *one.tensors[1:], torch.zeros(len(parts), 2, dtype=torch.int32))
    return Example(one.label, one.op, {**one.attributes, "tp_size": len(parts)}, tensors)


def fused(one: Example, parts: Tensor, rank: int) -> tuple[Tensor, ...]:
    with collective_scope(lambda _: parts):
        return on_rank(one, parts, rank).run()


def in_stock(one: Example, parts: Tensor, rank: int, all_reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    with executor_scope(stock_executor(all_reduce)):
        return on_rank(one, parts, rank).run()


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tp_size", [2, 3, 8])
@pytest.mark.parametrize("label", BOUNDARIES)
def test_separate_operations_have_the_bits_of_the_fused_one(label: str, tp_size: int, activation: torch.dtype) -> None:
    """On CPUs the stock way adds in rank order: every output of every boundary, MXFP8 included, on every rank."""
    one = example(label, activation, rows=9)
    parts = shares(one, tp_size)

    def work(rank: Any) -> tuple[Tensor, ...]:
        return in_stock(one, parts, rank.rank, HostGroup(rank).all_reduce)

    wanted = fused(one, parts, 0)
    for found in outcomes(tp_size, work):
        assert len(found) == len(wanted)
        for part, whole in zip(found, wanted, strict=True):
            assert torch.equal(part.isnan(), whole.isnan())
            assert torch.equal(part.nan_to_num(), whole.nan_to_num()) and part.dtype == whole.dtype


@pytest.mark.parametrize("label", ["MhcAllReduce v4.1", "MhcAllReduceResidualOnly"])
def test_another_order_of_the_sum_stays_within_the_bounds(label: str) -> None:
    """As NCCL adds: float32, any order, one rounding (spec 8.2). Rounding after every rank would not stay within."""
    one = example(label, torch.bfloat16, rows=16)
    parts = shares(one, 8)
    parts[-1, 1] = 1.0
    wanted = fused(one, parts, 0)

    def misses(all_reduce: Callable[[Tensor], Tensor]) -> list[int]:
        found = in_stock(one, parts, 0, all_reduce)
        bounds = [STREAMS, STREAMS, NORM][: len(wanted)]
        return [
            int((~torch.isclose(f.float(), w.float(), **b)).sum())
            for f, w, b in zip(found, wanted, bounds, strict=True)
        ]

    def other_order(_: Tensor) -> Tensor:
        return reduce_ranks(parts.flip(0))

    def stepwise(_: Tensor) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    assert not any(misses(other_order))
    assert misses(stepwise)[0] > 0


def test_boundaries_become_separate_operations() -> None:
    """What a GPU would launch: the all-reduce, then one-rank operations that need no mailbox."""
    seen: list[tuple[str, int | None]] = []

    def inner(op: Op, attributes: Any, tensors: Any, bindings: Any) -> Any:
        seen.append((op.name, getattr(attributes, "tp_size", None)))
        return op.reference(attributes, *tensors)

    one = example("MhcAllReduce v4.1", torch.bfloat16)
    parts = shares(one, 2)
    with executor_scope(stock_executor(lambda _: reduce_ranks(parts), inner)):
        on_rank(one, parts, 0).run()
        assert seen == [("MhcAllReduceResidualOnly", 1), ("HcCollapse", None)]
        one.run()
        example("HcCollapse", torch.bfloat16).run()
    assert seen[2:] == [("MhcAllReduce", 1), ("HcCollapse", None)]


@pytest.mark.parametrize(
    ("rows", "facts", "stock_calls"),
    [(9, NODE, 0), (257, NODE, 1), (9, Facts(4, 2, torch.bfloat16, ""), 1)],
    ids=["fits", "too many rows", "two nodes"],
)
def test_scope_follows_the_plan(rows: int, facts: Facts, stock_calls: int) -> None:
    """The fused way never meets the all-reduce, the stock way never the mailbox."""
    one = example("MhcAllReduceResidualOnly", torch.bfloat16, rows=rows)
    parts = shares(one, 4)
    reduced: list[Tensor] = []
    taken: list[int] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        reduced.append(tensor)
        return reduce_ranks(parts)

    def inner(op: Op, attributes: Any, tensors: Any, bindings: Any) -> Any:
        taken.append(attributes.tp_size)
        return op.reference(attributes, *tensors)

    executor: OpExecutor = inner
    with collective_scope(lambda _: parts), boundary_scope(facts, all_reduce, executor):
        on_rank(one, parts, 0).run()
    assert len(reduced) == stock_calls and taken == [1 if stock_calls else 4]


@pytest.mark.parametrize(("problem", "taken"), [("", 1), ("rank 1: no peer", 0)])
def test_split_sampling_without_a_mailbox_is_its_reference(problem: str, taken: int) -> None:
    """With one, the operation goes where all others go."""
    facts = Facts(2, 1, torch.float32, problem)
    base, table = torch.tensor([[[0.0, 1.0, 3.0]]]), torch.zeros(6, 4)
    tensors = (base, torch.zeros(1, dtype=torch.int32), table, table[:3], torch.zeros(2, 2, dtype=torch.int32))
    given: list[Op] = []

    def inner(op: Op, *_: Any) -> tuple[Tensor, ...]:
        given.append(op)
        return ()

    # The other rank has the same values, so of the equal winners this rank's has the lower id.
    with collective_scope(lambda own: torch.stack((own, own))), boundary_scope(facts, lambda t: t, inner):
        found = MARKOV_SAMPLING_SHARDED(*tensors, block_size=1, sampling=False, float64_noise=False, tp_size=2, rank=0)
    assert len(given) == taken and (taken or found[0].tolist() == [[2]])


# Setting NCCL up ----------------------------------------------------------------------------------------


def test_a_cpu_needs_no_process_group() -> None:
    assert isinstance(stock.open_group(SingleProcess(), torch.device("cpu")), HostGroup)


def test_missing_backend_is_named() -> None:
    with pytest.raises(StockError, match=r"rank 0: torch .* has no mpi backend"):
        stock.DistributedGroup(SingleProcess(), torch.device("cpu"), backend="mpi")


def test_group_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock.dist, "is_initialized", lambda: True)
    with pytest.raises(StockError, match="has a default group already, expected none; close the decoder"):
        stock.DistributedGroup(SingleProcess(), torch.device("cpu"), backend="gloo")


@pytest.mark.parametrize(
    ("backend", "set_before", "found"), [("nccl", None, "0"), ("nccl", "1", "1"), ("gloo", None, None)]
)
def test_nccl_leaves_multicast_alone_unless_told(
    backend: str, set_before: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP-13: NVLink multicast may be there and not work; who sets the variable is not overruled."""
    name, seen = "NCCL_NVLS_ENABLE", []
    monkeypatch.setenv(name, "" if set_before is None else set_before)
    if set_before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(stock.dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(stock.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(name)))
    stock.DistributedGroup(SingleProcess(), torch.device("cpu"), backend=backend, timeout_s=20)
    assert seen == [found]
    assert os.environ.get(name) == set_before, "the process has its variable back"


def test_one_rank_sums_with_itself() -> None:
    """A job of one: the group is made, float32 sums are rounded once, the input stays, the group ends."""
    job = stock.DistributedGroup(SingleProcess(), torch.device("cpu"), backend="gloo", timeout_s=20)
    try:
        x = torch.randn(3, 5).bfloat16().t()
        before = x.clone()
        found = job.all_reduce(x)
        assert torch.equal(found, before) and torch.equal(x, before) and found.data_ptr() != x.data_ptr()
        y = torch.randn(4)
        assert job.all_reduce(y).data_ptr() != y.data_ptr()
        assert torch.equal(job.all_gather(x), x.unsqueeze(0)) and torch.equal(job.all_to_all(x[:1]), x[:1])
    finally:
        job.close()
    assert not stock.dist.is_initialized()
