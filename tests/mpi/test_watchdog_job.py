"""A real job that hangs: every rank says where it stands, and the job ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.mpi_jobs import run_job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.mark.parametrize("phase", ["loading", "capture", "step 7 of 3 requests"])
def test_a_stuck_rank_ends_the_job_and_every_rank_is_named(phase: str) -> None:
    """TP-11: bounded time, rank and phase named, exit status not 0."""
    started = time.monotonic()
    job = run_job(2, Path(__file__).with_name("stuck_job.py"), phase, timeout=90)
    assert job.status != 0
    assert time.monotonic() - started < 60  # 6 s, and the start and end of the job on a loaded machine
    for rank in range(2):
        said = rf"rank {rank}: {phase} has not ended after \d+ s; last enqueued: the work of rank {rank}\."
        assert re.search(said, job.err), job.err
