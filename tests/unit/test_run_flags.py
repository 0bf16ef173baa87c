"""The flags of examples/run.py: what they make, and what they refuse; what all examples refuse alike."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from dspark_trt.builder.checkpoint import CheckpointError
from dspark_trt.builder.config import ConfigError
from dspark_trt.plugins.library import KernelUnavailableError
from dspark_trt.plugins.tensorrt_api import EngineLoadError
from dspark_trt.runtime_py.acceptance import ScheduleError
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.cuda_graphs import GraphError
from dspark_trt.runtime_py.interleaving import request_counts
from dspark_trt.runtime_py.mailbox import MailboxError
from dspark_trt.runtime_py.mapping import MappingError
from dspark_trt.runtime_py.requests import RequestError, SamplingParams, Statistics
from dspark_trt.runtime_py.scheduling import EarlyStop, FullLength, Lookahead, Scheduler, Threshold
from dspark_trt.runtime_py.stock import StockError

from tests.example_scripts import CHECKPOINT, load_example

run, decoding, common = load_example("run"), load_example("_decoding"), load_example("_common")
BLOCK = 5
COSTS = CostTable({1: 0.0}, {n: 1.0 + 0.1 * n for n in range(1, 7)})


def options(*flags: str) -> Any:
    return tyro.cli(run.Options, args=["--engine-dir", "engines", *flags])


def scheduler(*flags: str) -> Scheduler:
    return options(*flags).verification.scheduler_maker(BLOCK)(lambda: COSTS)  # type: ignore[no-any-return]


def test_every_sampling_parameter_is_a_flag() -> None:
    """Names, defaults and values arrive as the API has them."""
    assert options().sampling.checked() == SamplingParams()
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": 2**63,
        "num_draft_tokens": 2,
        "stop_token_ids": [4, 5],
        "stop": ["The end", "\n"],
        "ignore_eos": True,
    }
    assert given.keys() == {f.name for f in dataclasses.fields(SamplingParams)}
    flags: list[str] = []
    for name, value in given.items():
        flags.append("--" + name.replace("_", "-"))
        flags += [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    assert options(*flags).sampling.checked() == SamplingParams(**given)
    assert options("--max-output-len", "9").sampling.checked().max_tokens == 9, "TensorRT-LLM's name"


def test_sampling_parameters_are_checked_late() -> None:
    """Parsing ends the process without a word about the rank; the check can be reported by the job."""
    sampling = options("--top-k", "-3", "--temperature", "-1").sampling
    with pytest.raises(RequestError, match=r"temperature is -1\.0.*top_k is -3"):
        sampling.checked()


def test_schedulers() -> None:
    """Each kind with its source of probabilities; costs are measured for those that weigh them, once."""
    confidence = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])  # survival 0.88, 0.64, 0.32 ..
    assert isinstance(scheduler(), FullLength)
    threshold = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.6")
    assert isinstance(threshold, Threshold) and threshold.lengths(confidence, [5]) == [2]
    online = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.6", "--acceptance", "online")
    assert online.lengths(confidence, [5]) == [5], "no step was seen yet"
    flat = ["--confidence-temperatures", *["8"] * 5]
    calibrated = scheduler("--scheduler", "threshold", "--confidence-threshold", "0.5", *flat)
    assert calibrated.lengths(confidence / 100, [5]) == [3]
    for name, kind in (("early-stop", EarlyStop), ("lookahead", Lookahead)):
        assert isinstance(scheduler("--scheduler", name, "--profile-costs"), kind)
    # tau * SPS: 1 / 1.1, 1.88 / 1.2, 2.53 / 1.3, 2.85 / 1.4, 2.93 / 1.5.
    assert scheduler("--scheduler", "early-stop", "--profile-costs").lengths(confidence, [5]) == [3]

    def unwanted() -> CostTable:
        raise AssertionError("nothing weighs costs")

    for flags in ([], ["--scheduler", "threshold", "--confidence-threshold", "0.6"]):
        options(*flags).verification.scheduler_maker(BLOCK)(unwanted)


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ("--profile-costs", ["--profile-costs measures what .* weigh, the scheduler is full"]),
        ("--profile-costs --scheduler threshold --confidence-threshold 0.5", ["the scheduler is threshold; choose"]),
        ("--scheduler early-stop", ["--scheduler early-stop weighs costs; have them measured with --profile-costs"]),
        ("--scheduler lookahead", ["--scheduler lookahead weighs costs"]),
        ("--scheduler threshold", ["--confidence-threshold belongs to --scheduler threshold.*threshold None"]),
        ("--confidence-threshold 0.5", ["the scheduler is full and the threshold 0.5; pass both or neither"]),
        ("--acceptance head", ["--scheduler full needs neither"]),
        ("--confidence-temperatures 1 1 1 1 1", ["--scheduler full needs neither"]),
        (
            "--acceptance online --confidence-temperatures 1 1 --scheduler early-stop --profile-costs",
            ["which --acceptance online does without", "has 2 values, expected 5"],
        ),
        ("--num-draft-tokens 6", ["--num-draft-tokens is 6, the draft's block has 5"]),
        ("--compare-target-only --temperature 0.1", ["--compare-target-only wants the same tokens"]),
        ("--no-speculative --plot x.png", ["--no-speculative makes no drafts, which --plot asks for"]),
        (
            "--no-speculative --num-draft-tokens 3 --rejection-sample-method block --scheduler early-stop",
            ["which --num-draft-tokens, --rejection-sample-method, --scheduler asks for"],
        ),
        ("--no-speculative --profile-costs", ["which --profile-costs asks for"]),
    ],
)
def test_flags_that_contradict_each_other(flags: str, messages: list[str]) -> None:
    """Every contradiction is told, each by what to do, and nothing else is."""
    problems = options(*flags.split()).contradictions(BLOCK)
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--no-speculative --temperature 1 --top-k 5",
        "--compare-target-only --frequency-penalty 0.5 --num-draft-tokens 0",
        "--temperature 0.8 --rejection-sample-method block --num-draft-tokens 5",
        "--scheduler threshold --confidence-threshold 0 --acceptance online",
        "--scheduler lookahead --profile-costs --acceptance head --confidence-temperatures 1 1 1 1 2",
    ],
)
def test_flags_that_go_together(flags: str) -> None:
    assert options(*flags.split()).contradictions(BLOCK) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scheduler threshold --confidence-threshold 1.5", r"confidence threshold of 1\.5, expected a probability"),
        ("--scheduler threshold --confidence-threshold nan", "confidence threshold of nan"),
        ("--confidence-temperatures 1 0 1 -2 inf", r"temperatures \[0\.0, -2\.0, inf\], expected numbers above 0"),
    ],
)
def test_values_out_of_range(flags: str, message: str) -> None:
    """Before anything is loaded or measured."""
    with pytest.raises(ScheduleError, match=message):
        options(*flags.split()).verification.scheduler_maker(BLOCK)


def test_cost_table() -> None:
    """Sizes of both kinds in one column, in order; milliseconds."""
    table = run.cost_table(CostTable({1: 0.001, 2: 0.0025}, {2: 0.004, 12: 0.012}))
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["1", "2", "12"], ["1.00", "2.50", ""], ["", "4.00", "12.00"]]


@pytest.mark.parametrize(
    ("device_steps", "gap"),
    [
        pytest.param(10, ["20.000", "7%"], id="steps of the device"),
        pytest.param(4, ["50.000", "17%"], id="of both"),
        pytest.param(0, ["50.000", "17%"], id="of the host"),
    ],
)
def test_phases_of_a_step(device_steps: int, gap: list[str]) -> None:
    """Milliseconds of each of ten steps. Target calls of the prefill and drafts on entering are no steps."""
    seconds = {"total": 5.0, "prefill": 2.0, "target": 1.5, "verify": 0.25, "draft": 0.75, "gap": 0.2}
    stats = Statistics(
        decode_calls=10,
        device_steps=device_steps,
        target_calls=13,
        draft_calls=12,
        **{f"{name}_seconds": value for name, value in seconds.items()},
    )
    cells = [list(column.cells) for column in run.phase_table(stats).columns]
    assert cells == [
        ["target", "verify", "draft", "host gap"],
        ["150.000", "25.000", "75.000", gap[0]],
        ["50%", "8%", "25%", gap[1]],
    ]


def test_phases_without_a_step() -> None:
    """All tokens came from prefills."""
    table = run.phase_table(Statistics(target_calls=1, prefill_seconds=2.0, total_seconds=2.0))
    assert list(table.columns[1].cells) == ["0.000"] * 4


# ------------------------------------------------------------------------------------ files of users


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "taken/x.json",
            {},
            r"--out .*/taken/x\.json: .*/taken is not a directory, expected one to write in; pass ano",
        ),
        ("taken/deep/x.json", {}, r"/taken is not a directory"),
        ("taken", {"directory": True}, r"/taken is not a directory"),
        ("there", {}, r"--out .*/there: is a directory, expected the name of a file; pass one"),
        ("dangling/x", {}, r"/dangling is not a directory"),
        (
            "x.foo",
            {"suffixes": (".png", ".svg")},
            r"x\.foo: ends in none of \.png, \.svg; pass a name with one of these",
        ),
        ("png", {"suffixes": (".png",)}, r"png: ends in none of \.png;"),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path: Path, name: str, more: dict[str, Any], message: str) -> None:
    (tmp_path / "taken").write_text("x")
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(RequestError, match=message):
        common.check_output(tmp_path / name, "--out", **more)


@pytest.mark.parametrize(
    ("name", "denied", "message"),
    [
        ("new/x.json", "", r"--out .*/x\.json: the directory .* is not writable; pass another path or change its perm"),
        ("kept.json", "kept.json", r"--out .*/kept\.json: the file is not writable; pass another path or change its"),
    ],
)
def test_outputs_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, denied: str, message: str
) -> None:
    """As the operating system says; the superuser may write everywhere."""
    (tmp_path / "kept.json").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / denied)
    with pytest.raises(RequestError, match=message):
        common.check_output(tmp_path / name, "--out")


def test_outputs_that_can_be_written(tmp_path: Path) -> None:
    """New, in new directories, or there already; nothing is made by asking."""
    (tmp_path / "old.PNG").write_text("x")
    common.check_output(tmp_path / "old.PNG", "--out", suffixes=(".png",))
    common.check_output(tmp_path / "a" / "b" / "x.json.gz", "--out", suffixes=(".json", ".json.gz"))
    common.check_output(tmp_path, "--out", directory=True)
    common.check_output(tmp_path / "a" / "b", "--out", directory=True)
    common.check_output(Path("name-alone.json"), "--out")
    assert [p.name for p in tmp_path.iterdir()] == ["old.PNG"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plot x.foo", r"--plot x\.foo: ends in none of .*\.pdf, \.png.*; pass a name"),
        ("--plot x.pgf", r"--plot x\.pgf: ends in none of"),
        ("--trace x.txt", r"--trace x\.txt: ends in none of \.json, \.json\.gz; pass a name"),
        ("--stats-json .", r"--stats-json \.: is a directory"),
    ],
)
def test_outputs_of_a_run(flags: str, message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RequestError, match=message):
        run.check_outputs(options(*flags.split()), common.import_pyplot())


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    """Named, with the byte, in one line; a directory is no file."""
    (tmp_path / "latin1.txt").write_bytes("It was\nSie h\xe4tte".encode("latin-1"))
    with pytest.raises(RequestError) as refusal:
        common.read_prompts(tmp_path / "latin1.txt")
    wanted = "byte 12 is 0xe4, which is not UTF-8; pass a file with one prompt per line, saved as UTF-8"
    assert str(refusal.value) == f"{tmp_path}/latin1.txt: {wanted}"
    (tmp_path / "good.txt").write_bytes("Sie h\xe4tte\n".encode())
    assert common.read_prompts(tmp_path / "good.txt") == ["Sie h\xe4tte"]
    with pytest.raises(RequestError, match="Is a directory; pass a file with one prompt per line"):
        common.read_prompts(tmp_path)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """Of any system; other characters that Unicode counts as line ends belong to the prompt."""
    (file := tmp_path / "prompts.txt").write_bytes("a\fb\vc\x1cd\x85e\u2028f\r\n \n\ng h\ri".encode())
    assert common.read_prompts(file) == ["a\fb\vc\x1cd\x85e\u2028f", "g h", "i"]
    (tmp_path / "ids.txt").write_text("1 2\f3\n4\n")
    assert load_example("dump_draft").read_prompt_ids(tmp_path / "ids.txt") == [[1, 2, 3], [4]]


def test_a_prompt_that_is_no_text() -> None:
    """A byte of the command line that is not UTF-8 arrives as half of a pair."""
    text = common.Text(CHECKPOINT, 256)
    assert text.encode("It") == [256, *b"It"]
    with pytest.raises(
        RequestError, match=r"prompt 'It \\udcff': character 3 is U\+DCFF, which is no text; pass the pro"
    ):
        text.encode("It \udcff")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b"{}"])
def test_a_damaged_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RequestError, match=r"tokenizer\.json: not a tokenizer \(.+\); copy the checkpoint's tokenizer"):
        common.Text(tmp_path, None)


# ------------------------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MappingError("x"), 2),
        (ConfigError("x"), 2),
        (EngineLoadError("x"), 2),
        (KernelUnavailableError("x"), 2),
        (StockError("x"), 2),
        (CheckpointError("x"), 1),
        (MailboxError("x"), 1),
        (GraphError("x"), 1),
    ],
)
def test_what_is_refused_and_what_failed(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Where opening tells that the directory, the ranks or the machine won't do, the status is that of a refusal; an
    error that may also come of a disk or a GPU that fails is a failure, with its place."""
    with (
        pytest.raises(SystemExit) as ended,
        common.watched(SingleProcess(), timeout_s=100, debug=False) as progress,
        progress.operation("loading of the draft"),
    ):
        raise error
    assert ended.value.code == status
    place = "" if status == 2 else " [in loading of the draft; last enqueued: loading of the draft]"
    assert capsys.readouterr().err == f"rank 0: {type(error).__name__}: x{place}\n"


def test_the_help_says_what_is_captured() -> None:
    """The largest batch too, which need not be a power of two."""
    assert request_counts(6) == (1, 2, 4, 6)
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
        tyro.cli(run.Options, args=["--help"])
    words = " ".join(re.sub("[^a-z ]", " ", told.getvalue()).split())
    assert "left out powers of two and the largest batch" in words
