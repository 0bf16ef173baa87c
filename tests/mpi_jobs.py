"""Programs as jobs under mpirun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.example_scripts import EXAMPLES


@dataclass(frozen=True)
class Job:
    """A job that ended: exit status, and what all ranks printed."""

    status: int
    out: str
    err: str


@lru_cache
def mpirun(ranks: int) -> tuple[str, ...]:
    """The command that starts ``ranks`` ranks, skipping the test where there is none."""
    command = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        pytest.skip("no mpirun; install an MPI, for example: pip install '.[mpi]' in the repository")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    flags = []
    if "Open MPI" in version:
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        flags += ["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []
    return (command, *flags, "-n", str(ranks))


def run_job(ranks: int | None, *arguments: str | Path, timeout: float = 180) -> Job:
    """Run a Python program on ``ranks`` ranks, or without a launcher for None."""
    command = [*(mpirun(ranks) if ranks else ()), sys.executable, *map(str, arguments)]
    # A rank that waits gives its core to others; the machine may have other work.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Killed, mpirun would leave its ranks behind; asked, it ends them.
        process.terminate()
        out, err = process.communicate(timeout=30)
        pytest.fail(f"the job was still running after {timeout} s\n{out}\n{err}")
    return Job(process.returncode, out, err)


def run_example(ranks: int | None, engines: Path, *arguments: str | Path, timeout: float = 180) -> Job:
    """Run ``examples/run.py`` on an engine directory."""
    return run_job(ranks, EXAMPLES / "run.py", "--engine-dir", engines, *arguments, timeout=timeout)


def error_lines(text: str) -> list[str]:
    """What the program itself said on stderr, without the launcher's own remarks."""
    # The launcher writes at the same time, and may leave a blank in front of a rank's line.
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(error: |rank \d+: )", line)]
