"""Sampling split over ranks, in whole decode jobs (rows SMP-2, SMP-9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mpi_jobs import run_example
from tests.placeholder_engines import make_engines

pytestmark = pytest.mark.mpi


def test_split_loops_give_the_same_decoding(tmp_path: Path) -> None:
    """Both loops by turns, as requests end: text equal to target-only text, ranks in lock-step, and as many drafts
    kept as with the whole loop."""
    reports = []
    for options in ({"vocabulary_split_from": 0}, {"vocabulary_split_from": 1, "request_split_from": 2}):
        engines, stats = make_engines(tmp_path, 2, max_batch_size=2, max_seq_len=320, **options), tmp_path / "stats"
        arguments = ["--prompt", "It is", "The man", "--max-output-len", "10", "--check-lockstep"]
        arguments += ["--compare-target-only"] if "request_split_from" in options else []
        job = run_example(2, engines, *arguments, "--stats-json", stats)
        assert job.status == 0, job.err
        reports.append(json.loads(stats.read_text()))
    whole, split = reports
    assert split["completions"] == whole["completions"] and split["identical_to_target_only"] is True
    assert split["tokens_per_step"] == whole["tokens_per_step"] > 1
