"""Ranks that stay together: 300,000 tokens with foreign random numbers between them, and ranks that are unlike."""

from __future__ import annotations

import json

import pytest

from tests.mpi_jobs import run_job


@pytest.mark.mpi
def test_two_ranks_in_lockstep() -> None:
    """SMP-2, SMP-9: 300,000 tokens of greedy, sampled and scheduled requests, seeds drawn by rank 0, without any
    difference; where one rank's logits differ by an ulp at a tie, both emit rank 0's tokens and nobody hangs, and
    the check, which steps on the device always make, names both decisions on both ranks."""
    job = run_job(2, "-m", "tests.mpi.lockstep_job", timeout=300)
    assert job.status == 0, job.err
    report = json.loads(job.out)
    assert report["tokens"] == 300_000 and report["equal"] and report["steps"] > 30
    assert report["unlike_equal"] and report["unlike_tokens"] == [[0] * 200] * 2
    for first, second in (report["errors"], report["device_errors"]):
        assert first == second and "ranks decided differently" in first
