"""Ranks that stay together: 300,000 tokens with foreign random numbers between them, and ranks that are unlike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.mpi
def test_two_ranks_in_lockstep() -> None:
    """SMP-2, SMP-9: 300,000 tokens of greedy, sampled and scheduled requests, seeds drawn by rank 0, without any
    difference; where one rank's logits differ by an ulp at a tie, both emit rank 0's tokens and nobody hangs, and
    the check, if asked for, names both decisions on both ranks."""
    command = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        pytest.skip("no mpirun; install an MPI, for example: pip install 'dspark-trt[mpi]'")
    flags = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    job = subprocess.run(
        [
            *(command, *([*flags, "--oversubscribe"] if "Open MPI" in version else []), "-n", "2"),
            *(sys.executable, "-m", "tests.mpi.lockstep_job"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["tokens"] == 300_000 and report["equal"] and report["steps"] > 30
    assert report["unlike_equal"] and report["unlike_tokens"] == [[0] * 200] * 2
    first, second = report["errors"]
    assert first == second and "ranks decided differently" in first
