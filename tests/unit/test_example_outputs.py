"""Output of the examples that can't be printed or written: one line, and no file is lost for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.output_files import OutputError
from dspark_trt.runtime_py.requests import Statistics
from dspark_trt.runtime_py.watchdog import Progress
from rich.table import Table

from tests.example_scripts import EXAMPLES, load_example
from tests.placeholder_engines import make_engines
from tests.unit.test_measure_acceptance import example_rows

PRINTING = """
import sys
sys.path.insert(0, sys.argv[1])
from _common import Output, watched
from dspark_trt.runtime_py.communicator import SingleProcess
with watched(SingleProcess(), timeout_s=60, debug=False):
    Output().print("h\u00e9 \u2588 \u20ac")
    Output(rank=1).print("another rank")
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("engines"), 1, max_batch_size=2, max_seq_len=64)


def print_to(stdout: Any, encoding: str = "utf-8") -> tuple[int, bytes, str]:
    """Exit status, what was printed and the errors of a program whose standard output is ``stdout``."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTING, str(EXAMPLES)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        # With buffers, which what can't be written stays in.
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": ""},
        check=False,
    )
    return done.returncode, done.stdout or b"", done.stderr.decode()


@pytest.mark.parametrize(("encoding", "printed"), [("latin-1", b"h\xe9 ? ?\n"), ("utf-8", "hé █ €\n".encode())])
def test_characters_without_a_code_are_replaced(encoding: str, printed: bytes) -> None:
    assert print_to(subprocess.PIPE, encoding) == (0, printed, "")


def told(reason: str) -> str:
    return (
        f"rank 0: OutputError: standard output: {reason}, expected room for what is printed; keep its reader running, "
        "or redirect it to a file on a disk with room [in the job; last enqueued: the job]\n"
    )


def test_a_full_disk_behind_standard_output() -> None:
    """One line, and nothing more when the interpreter ends and empties its buffers."""
    with Path("/dev/full").open("wb") as full:
        assert print_to(full) == (1, b"", told("No space left on device"))


def test_a_reader_that_ended() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        assert print_to(pipe) == (1, b"", told("Broken pipe"))


class Pager:
    """Standard output whose reader ends at the first text or table."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def print(self, *objects: Any, **_: Any) -> None:
        if "\n> It\n" in str(objects[0]) or isinstance(objects[0], Table):
            raise OutputError("broken")


def test_files_are_written_before_the_summary(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what a run leaves behind."""
    pytest.importorskip("matplotlib")
    run = load_example("run")
    monkeypatch.setattr(run, "Output", Pager)
    files = ["--stats-json", str(tmp_path / "stats.json"), "--plot", str(tmp_path / "plot.png")]
    flags = ["--max-output-len", "2", "--run-profiling", "--compare-target-only", "--device", "cpu"]
    options = run.parse_options(run.Options, ["--engine-dir", str(engines), "--prompt", "It", *flags, *files], None)
    with pytest.raises(OutputError, match="broken"):
        run.run(options, EngineDir.open(engines), SingleProcess(), Progress())
    report = json.loads((tmp_path / "stats.json").read_text())
    assert report["identical_to_target_only"] is True and len(report["profiling"]) == 3
    assert (tmp_path / "plot.png").exists()


def test_statistics_that_cannot_be_written(engines: Path, tmp_path: Path) -> None:
    """One line with file and reason, and the status of a failure."""
    (stats := tmp_path / "stats.json").symlink_to("/dev/full")
    flags = ["--device", "cpu", "--prompt", "It", "--max-output-len", "2", "--stats-json", stats]
    command = [sys.executable, EXAMPLES / "run.py", "--engine-dir", engines, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted = f"rank 0: OutputError: {stats}: No space left on device, expected to write the file there; make room,"
    assert done.returncode == 1 and done.stderr.startswith(wanted) and done.stderr.count("\n") == 1


def test_plots_and_measurements_that_cannot_be_written(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run, measuring = load_example("run"), load_example("measure_acceptance")
    monkeypatch.setattr(measuring, "measure", lambda *_: iter(example_rows()))
    options = measuring.Options(engine_dir=engines, output=tmp_path, device="cpu")
    for name in ("acceptance.png", "acceptance.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("/dev/full")
        with pytest.raises(OutputError, match=f"^{tmp_path / name}: No space left on device"):
            measuring.run(options, EngineDir.open(engines), SingleProcess(), Progress())
    with pytest.raises(OutputError, match=r"acceptance\.png: No space left on device"):
        run.plot_acceptance(Statistics(), tmp_path / "acceptance.png", run.import_pyplot())


def test_measurements_are_written_before_their_tables(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    measuring = load_example("measure_acceptance")
    monkeypatch.setattr(measuring, "Output", Pager)
    monkeypatch.setattr(measuring, "measure", lambda *_: iter(example_rows()))
    options = measuring.Options(engine_dir=engines, output=tmp_path / "out", device="cpu")
    with pytest.raises(OutputError, match="broken"):
        measuring.run(options, EngineDir.open(engines), SingleProcess(), Progress())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["acceptance.json", "acceptance.png"]
