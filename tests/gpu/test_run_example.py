"""examples/run.py on GPUs, as users start it: one job with everything that opens a decoder after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.gpus import over_gpus
from tests.mpi_jobs import run_example
from tests.placeholder_engines import make_engines

pytestmark = pytest.mark.timeout(200)


@over_gpus
def test_speculative_decoding_is_that_of_the_target_alone(gpus: int, tmp_path: Path) -> None:
    """A rank on each GPU, with default builds, whose prefill needs NCCL beside the mailbox; in float32 no tie is near.
    Profiling runs between the two decoders."""
    engines = make_engines(tmp_path, gpus, numerics="dequantized", dtype="float32")
    job = run_example(
        None if gpus == 1 else gpus,
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
