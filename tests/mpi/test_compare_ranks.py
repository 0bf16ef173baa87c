"""examples/compare_accuracy.py on the ranks of a tensor-parallel network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.example_scripts import EXAMPLES
from tests.mpi_jobs import run_job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
COMPARE = EXAMPLES / "compare_accuracy.py"
OPTIONS = ("--networks", "draft", "--num-prompts", "1")


def test_a_sharded_network_is_compared_on_all_ranks(engines: Callable[[int], Path]) -> None:
    """Plugin references gather over MPI like the session; ONNX Runtime and TensorRT are left out by name."""
    job = run_job(2, COMPARE, "--engine-dir", engines(2), *OPTIONS)
    assert job.status == 0, job.err
    assert job.out.count("draft: released numerics, bfloat16, 2 rank(s)") == 1, "one rank speaks"
    assert job.out.count("│ plugin-references │") == 5
    assert "onnxruntime left out: " in job.out and "tensorrt left out: " in job.out
    assert "all outputs agree" in job.out


def test_prompts_that_cannot_be_read_end_both_ranks(engines: Callable[[int], Path]) -> None:
    job = run_job(2, COMPARE, "--engine-dir", engines(2), "--prompts-file", "absent.txt")
    assert job.status == 2 and "RequestError: absent.txt: No such file" in job.err and "Traceback" not in job.err


def test_a_sharded_network_without_a_launcher(engines: Callable[[int], Path]) -> None:
    job = run_job(None, COMPARE, "--engine-dir", engines(2), *OPTIONS)
    assert job.status == 2
    assert "built for 2 ranks" in job.err and "mpirun -n 2 python examples/compare_accuracy.py" in job.err
