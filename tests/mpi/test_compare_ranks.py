"""examples/compare_accuracy.py on the ranks of a tensor-parallel network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.example_scripts import EXAMPLES
from tests.mpi_jobs import error_lines, run_job

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


HANGING = """
import sys, time
from mpi4py import MPI
from tests.example_scripts import load_example

compare_accuracy = load_example("compare_accuracy")
run = compare_accuracy.Comparator.run

def hanging(runners, **more):
    if MPI.COMM_WORLD.Get_rank() == 1 and runners[0].name == "plugin-references":
        time.sleep(600)
    return run(runners, **more)

compare_accuracy.Comparator.run = hanging
sys.exit(compare_accuracy.main(sys.argv[1:]))
"""


def test_a_rank_that_hangs_is_named(engines: Callable[[int], Path]) -> None:
    """TP-11: the other waits for it in the same runner's collective; both say so, and the job ends."""
    # The slowest part before it, the export, takes a third of this on a busy machine.
    job = run_job(2, "-c", HANGING, "--engine-dir", engines(2), *OPTIONS, "--timeout", "30", timeout=200)
    assert job.status == 1
    for rank in range(2):
        said = rf"rank {rank}: plugin-references of the draft has not gone on for \d+ s; .*; ending the job"
        assert [line for line in error_lines(job.err) if re.fullmatch(said, line)], job.err
    assert "all outputs agree" not in job.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--networks"], "--networks was given 2 times, expected once; pass all values after one"),
        (["--dtype", "float16"], "the released numerics of the engines are bfloat16, --dtype is float16"),
        (["--save", "/dev/null"], "--save /dev/null: /dev/null is not a directory"),
        (["--timeout", "0"], "--timeout is 0.0, expected a number of seconds above 0"),
    ],
)
def test_what_is_refused_ends_both_ranks(engines: Callable[[int], Path], arguments: list[str], message: str) -> None:
    job = run_job(2, COMPARE, "--engine-dir", engines(2), *OPTIONS, *arguments)
    assert job.status == 2 and message in job.err and "Traceback" not in job.err and "agree" not in job.out


def test_a_sharded_network_without_a_launcher(engines: Callable[[int], Path]) -> None:
    job = run_job(None, COMPARE, "--engine-dir", engines(2), *OPTIONS)
    assert job.status == 2
    assert "built for 2 ranks" in job.err and "mpirun -n 2 python examples/compare_accuracy.py" in job.err
