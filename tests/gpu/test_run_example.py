"""examples/run.py on GPUs, as users start it: one job with everything that opens a decoder after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mpi_jobs import run_example
from tests.placeholder_engines import make_engines

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.gpu, id="one-gpu"), pytest.param(2, marks=pytest.mark.gpu2, id="two-gpus")],
)
def test_speculative_decoding_is_that_of_the_target_alone(ranks: int, tmp_path: Path) -> None:
    """With default builds, whose prefill needs NCCL beside the mailbox; in float32 no tie is near. Profiling runs
    between the two decoders."""
    engines = make_engines(tmp_path, ranks, numerics="dequantized", dtype="float32")
    job = run_example(
        None if ranks == 1 else ranks,
        engines,
        *("--max-output-len", "80", "--device", "cuda", "--run-profiling", "--profile"),
        *("--compare-target-only", "--stats-json", tmp_path / "stats.json"),
    )
    assert job.status == 0, job.err
    assert "token ids are identical to target-only decoding" in job.out
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["identical_to_target_only"] is True
    assert stats["tokens_per_step"] > 2 and stats["target_only"]["tokens"] == stats["tokens"]
    assert stats["device_steps"] > 0 and stats["target_only"]["device_steps"] > stats["device_steps"]
    assert len(stats["profiling"]) == 3
