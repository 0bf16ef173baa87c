"""examples/measure_acceptance.py on the trained tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.example_scripts import EXAMPLES
from tests.mpi_jobs import run_job
from tests.placeholder_engines import make_engines

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
MEASURE = EXAMPLES / "measure_acceptance.py"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, with drafts that sample."""
    root = tmp_path_factory.mktemp("engines")
    return make_engines(root, 2, max_batch_size=2, max_seq_len=320, sampling=True)


def test_report_on_two_ranks(engines: Path, tmp_path: Path) -> None:
    """Temperature 0 once, others by each method; drafts are accepted; files are written and one rank speaks."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("It was\nShe had been so much\n")
    job = run_job(
        2,
        *(MEASURE, "--engine-dir", engines, "--output", tmp_path / "out", "--prompts-file", prompts),
        *("--temperatures", "0", "0.8", "--max-output-len", "16", "--bootstrap-samples", "100"),
        *("--backend", "torch", "--timeout", "200"),
    )
    assert job.status == 0, job.err
    assert job.out.count("drafts kept by position, %") == 1
    report = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    rows = report["acceptance"]
    assert [(r["temperature"], r["method"]) for r in rows] == [(0, "greedy"), (0.8, "standard"), (0.8, "block")]
    assert "executor: torch session on the CPU (--backend torch); ranks: 2" in job.out and report["executor"] == "torch"
    assert report["drafts"] == "sampled" and report["device"].startswith("the CPU")
    for row in rows:
        assert row["tokens_per_step"]["mean"] > 1.5
        assert len(row["kept"]) == len(row["confidence_temperatures"]) == 5
        kept = [share["mean"] for share in row["kept"]]
        assert kept == sorted(kept, reverse=True) and row["tokens_per_step"]["mean"] == pytest.approx(
            1 + sum(kept), abs=1e-3
        )
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperatures", "-1"], "RequestError: temperature is -1.0"),
        (["--timeout", "inf"], "RequestError: --timeout is inf, expected a number of seconds above 0"),
        (["--backend", "tensorrt"], "TensorRTUnavailableError: --backend tensorrt: "),
        (["--temperatures", "--methods"], "error: --temperatures names none, expected at least one; leave the "),
        (["--max-output-len", "1"], "RequestError: --max-output-len is 1, expected at least 2, as the first token"),
        (["--bootstrap-samples", "0"], "RequestError: --bootstrap-samples is 0, expected at least 1; pass more"),
        (["--output", "/dev/null"], "RequestError: --output /dev/null/acceptance.json: /dev/null is not a directory"),
    ],
)
def test_what_is_refused_ends_both_ranks(engines: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    """Before anything is decoded or written."""
    job = run_job(2, MEASURE, "--engine-dir", engines, "--output", tmp_path / "out", *arguments)
    assert job.status == 2 and message in job.err and "Traceback" not in job.err
    assert not (tmp_path / "out").exists() and "tokens per step" not in job.out
