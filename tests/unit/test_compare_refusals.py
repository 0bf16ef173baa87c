"""What examples/compare_accuracy.py refuses to compare, and how it ends when a rank hangs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.requests import RequestError
from dspark_trt.runtime_py.watchdog import Progress

from tests.example_scripts import CHECKPOINT, EXAMPLES, load_example

compare_accuracy = load_example("compare_accuracy")


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_accuracy.main([]) == 2
    assert compare_accuracy.main(["--checkpoint", str(CHECKPOINT), "--engine-dir", "x"]) == 2
    assert compare_accuracy.main(["--checkpoint", str(tmp_path / "absent")]) == 2
    printed = capsys.readouterr().err.splitlines()
    wanted = "of --checkpoint and --engine-dir was given, expected one; pass either"
    assert printed[:2] == [f"error: neither {wanted}", f"error: both {wanted}"]
    assert printed[2].startswith("error: ") and "absent" in printed[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-prompts -1", "--num-prompts is -1, expected at least 1; pass more"),
        ("--num-prompts 0", "--num-prompts is 0, expected at least 1; pass more"),
        ("--num-prompts 100", "--num-prompts is 100, expected at most 64, which are decoded at once; pass fewer"),
        (
            "--numerics released --dtype float16",
            "released numerics are bfloat16, --dtype is float16; add --numerics dequantized (in place of released), or "
            "leave --dtype out",
        ),
    ],
)
def test_nothing_is_compared_of_what_is_refused(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CMP-2: no word of agreement, and before the checkpoint is converted."""
    monkeypatch.setattr(compare_accuracy, "convert_checkpoint", None)
    assert compare_accuracy.main(["--checkpoint", str(CHECKPOINT), *flags.split()]) == 2
    printed = capsys.readouterr()
    assert re.match(f"error: {re.escape(message)}", printed.err) and printed.err.count("\n") == 1 and printed.out == ""


def test_agreement_wants_outputs() -> None:
    """CMP-2: zero outputs that differ are agreement only where outputs were compared, on every rank."""
    assert compare_accuracy.verdict([(8, 0), (8, 0)]) == (0, "all outputs agree")
    assert compare_accuracy.verdict([(8, 0), (8, 3)]) == (1, "3 outputs differ")
    nothing = "no output was compared on rank 1, so nothing is known to agree"
    assert compare_accuracy.verdict([(8, 0), (0, 0)]) == (1, nothing)
    assert compare_accuracy.verdict([(0, 0)])[0] == 1


def test_released_engines_take_no_other_dtype() -> None:
    """The numerics come from the directory, and a type that they don't have would be left unsaid."""
    built = BuildConfig(max_batch_size=2)
    options = compare_accuracy.Options(engine_dir=Path("e"), dtype="float16")
    wanted = "the released numerics of the engines are bfloat16, --dtype is float16; add --numerics dequantized"
    with pytest.raises(RequestError, match=wanted):
        compare_accuracy.build_asked_for(options, built)
    other = compare_accuracy.Options(engine_dir=Path("e"), dtype="float16", numerics="dequantized")
    assert compare_accuracy.build_asked_for(other, built).dtype == "float16"


def test_a_place_to_save_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_accuracy, "convert_checkpoint", None)
    (tmp_path / "file").write_text("x")
    assert compare_accuracy.main(["--checkpoint", str(CHECKPOINT), "--save", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --save {tmp_path}/file: {tmp_path}/file is not a directory")


@pytest.mark.parametrize("missing", ["polygraphy", "onnxruntime"])
def test_packages_that_the_base_install_lacks(missing: str) -> None:
    """What to install is said before any work."""
    program = "import runpy, sys; sys.modules[sys.argv[1]] = None; sys.path.insert(0, sys.argv[2]); "
    program += "runpy.run_path(sys.argv[2] + '/compare_accuracy.py', run_name='__main__')"
    command = [sys.executable, "-c", program, missing, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted = f"the comparison needs {missing}; install it with: pip install '.[compare]' in the repository"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {wanted}\n")


def test_a_comparison_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """TP-11: what a rank was at is told; what goes over weights has the more time the larger they are."""
    ended = threading.Event()

    class Ending(SingleProcess):
        def abort(self, code: int) -> None:
            ended.set()

    def hang(*_: Any) -> Any:
        assert ended.wait(60)
        raise InterruptedError

    monkeypatch.setattr(compare_accuracy, "connect", lambda *_: Ending())
    monkeypatch.setattr(compare_accuracy, "record_feeds", hang)
    monkeypatch.setattr(compare_accuracy, "SLOWEST_BYTES_PER_SECOND", 1e9)
    arguments = ["--checkpoint", str(CHECKPOINT), "--numerics", "released", "--num-prompts", "1"]
    with pytest.raises(AssertionError, match="ends the job"):
        compare_accuracy.main([*arguments, "--timeout", "2"])
    said = r"rank 0: decode that the inputs are of has not gone on for \d+ s; .*\(--timeout\); ending the job"
    assert re.search(said, capsys.readouterr().err)


def test_parts_of_a_comparison_have_time_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A legitimate run of large weights must not be taken for stuck: each part over them says so."""
    told: dict[str, float] = {}

    class Listening(Progress):
        @contextmanager
        def operation(self, name: str, *, extra_s: float = 0.0) -> Iterator[None]:
            told[name] = extra_s
            yield

    @contextmanager
    def watched(*_: Any, **__: Any) -> Iterator[Progress]:
        yield Listening()

    monkeypatch.setattr(compare_accuracy, "watched", watched)
    monkeypatch.setattr(compare_accuracy, "CALLS", 1)
    arguments = ["--checkpoint", str(CHECKPOINT), "--numerics", "dequantized", "--networks", "draft"]
    assert compare_accuracy.main([*arguments, "--num-prompts", "1"]) == 0
    runners = {"torch of the draft", "plugin-references of the draft", "onnxruntime of the draft"}
    assert runners | {"loading of the weights", "decode that the inputs are of", "export of the draft"} < told.keys()
    # The tiny checkpoint has some megabytes.
    assert all(seconds > 0.1 for name, seconds in told.items() if name != "opening and running of the engines")
