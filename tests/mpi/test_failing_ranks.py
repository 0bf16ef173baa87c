"""Real jobs of which one rank fails, dies or hangs: the others end soon, and what is printed names the rank and where
it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi_jobs import Job, error_lines, run_job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(200)]

ENDS_WITHIN = 30.0
"""Seconds from a failure to the end of the job; MPI's own teardown takes one or two on an idle machine."""
PHASES = {
    "load": r"loading of the draft's weights",
    "capture": r"capture of 2 greedy requests",
    "step": r"step 7 of 1 requests",
}


def failing_job(engines: Path, where: str, how: str) -> Job:
    job = run_job(2, "-m", "tests.mpi.failing_job", where, how, engines, timeout=120)
    failed_at = float(re.search(r"failing at ([\d.]+)", job.out)[1])  # type: ignore[index]
    assert time.time() - failed_at < ENDS_WITHIN
    return job


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("load", "CheckpointError: the disk went away"),
        ("capture", "RuntimeError: the capture failed"),
        ("step", "RuntimeError: the seventh step failed"),
    ],
)
def test_a_rank_that_fails_ends_the_job(engines: Callable[[int], Path], where: str, message: str) -> None:
    """TP-11: the other rank waits in a collective; the error names the rank and what it was doing."""
    job = failing_job(engines(2), where, "raise")
    assert job.status == 1
    said = rf"rank 1: {message} \[in {PHASES[where]}; last enqueued: .*\]"
    assert [line for line in error_lines(job.err) if re.fullmatch(said, line)], job.err
    assert ("Traceback" in job.err) == (where != "load"), "a surprise shows where it happened"


@pytest.mark.parametrize("where", PHASES)
def test_a_rank_that_dies_ends_the_job(engines: Callable[[int], Path], where: str) -> None:
    """TP-11: the launcher names the rank; nobody else could."""
    job = failing_job(engines(2), where, "kill")
    assert job.status != 0
    assert re.search(r"rank 1\b|rank: 1\b|RANK 1\b|\[1\]|EXIT CODE: 9", job.out + job.err), job.err


@pytest.mark.parametrize("where", PHASES)
def test_a_rank_that_hangs_ends_the_job_and_every_rank_is_named(engines: Callable[[int], Path], where: str) -> None:
    """TP-11: bounded time, and where each rank stood: rank 0 waits for the other in whatever comes next."""
    job = failing_job(engines(2), where, "hang")
    assert job.status != 0
    stuck = r"has not gone on for \d+ s; last enqueued: .*; ending the job"
    lines = error_lines(job.err)
    assert [line for line in lines if re.fullmatch(rf"rank 1: {PHASES[where]} {stuck}", line)], job.err
    assert [line for line in lines if re.fullmatch(rf"rank 0: .+ {stuck}", line)], job.err
