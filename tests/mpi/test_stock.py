"""The stock way between two ranks: boundaries as an all-reduce and separate operations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi_jobs import run_job


@pytest.mark.mpi
def test_two_ranks_go_the_stock_way_together(engines: Callable[[int], Path]) -> None:
    """TP-8: only rank 1 lacks a mailbox, both leave it; the target's logits, features and rings have the
    bits of the fused operation's reference, with the gathered sum and with the all-reduce of torch.distributed (two
    summands have one order), which needs no environment and no port of its own."""
    job = run_job(2, "-m", "tests.mpi.stock_job", engines(2), timeout=240)
    assert job.status == 0, job.err
    first, second = json.loads(job.out)["ranks"]
    assert first == second
    assert first["reason"] == "there is no mailbox: rank 1: no peer access"
    assert first["sums"] == [True] * 3 and first["dtypes"] == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert first["moved"] == [True] * 3
    assert first["equal"] == {"gathered": True, "distributed": True} and first["finite"]
