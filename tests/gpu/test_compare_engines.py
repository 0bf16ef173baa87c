"""examples/compare_accuracy.py with real engines: the whole comparison on a GPU, on one rank and on two."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from dspark_trt.builder.engine_dir import EngineDir, network_io

from tests.example_scripts import EXAMPLES, load_example
from tests.gpu.engine_calls import Open
from tests.mpi_jobs import run_job

pytest.importorskip("polygraphy", reason="the comparison needs Polygraphy: pip install '.[compare]'")
pytest.importorskip("onnxruntime", reason="the comparison needs ONNX Runtime: pip install '.[compare]'")


@dataclass(frozen=True)
class Row:
    """One row of the printed tables."""

    runner: str
    output: str
    passed: bool


def rows_of(printed: str) -> list[Row]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    return [Row(c[0], c[1], c[5] == "ok") for c in cells if len(c) == 6]


def check(printed: str, directory: EngineDir) -> None:
    print(printed)
    rows = [row for row in rows_of(printed) if row.runner == "tensorrt"]
    wanted = [
        output.name for kind in ("draft", "target") for output in network_io(kind, directory, directory.build).outputs
    ]
    assert [row.output for row in rows] == wanted and all(row.passed for row in rows)
    assert "tensorrt left out" not in printed and "all outputs agree" in printed


@pytest.mark.gpu
def test_engines_are_compared_with_torch(
    tensorrt_engines: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill in parts and steps of a decode, the caches as the torch session left them: within 2e-5 in float32."""
    directory = tensorrt_engines("float32", 1)
    monkeypatch.setenv("COLUMNS", "160")
    status = load_example("compare_accuracy").main(["--engine-dir", str(directory.path)])
    check(capsys.readouterr().out, directory)
    assert status == 0


@pytest.mark.gpu
def test_other_numerics_leave_the_engines_out(tensorrt_engines: Open, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tensorrt_engines("float32", 1)
    options = ["--networks", "draft", "--num-prompts", "1", "--dtype", "float16"]
    assert load_example("compare_accuracy").main(["--engine-dir", str(directory.path), *options]) == 0
    printed = capsys.readouterr().out
    assert "tensorrt left out: its engines compute dequantized numerics in float32, not dequantized in" in printed


@pytest.mark.gpu2
def test_engines_of_two_ranks_are_compared_with_torch(tensorrt_engines: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references gather over MPI, the engines through the mailbox between the GPUs."""
    directory = tensorrt_engines("float32", 2)
    monkeypatch.setenv("COLUMNS", "160")
    job = run_job(2, EXAMPLES / "compare_accuracy.py", "--engine-dir", directory.path, timeout=300)
    assert job.status == 0, job.out + job.err
    check(job.out, directory)
