"""The Polygraphy comparison: what it must not pass (cases CMP-1 to CMP-6), its data, its runners."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import convert_checkpoint, read_shard_config
from dspark_trt.builder.config import Numerics
from dspark_trt.builder.network import Kind, load_network
from dspark_trt.plugins.op import Op
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.session import TorchSession
from polygraphy.comparator import Comparator, IterationResult, RunResults
from polygraphy.json import load_json
from torch import Tensor

from tests.example_scripts import CHECKPOINT, load_example

_comparison = load_example("_comparison")
_runners = load_example("_runners")
compare_accuracy = load_example("compare_accuracy")

LIMIT = 1e-5
NOTHING = float("nan")


def results(*runs: list[dict[str, Any]]) -> RunResults:
    """What Comparator.run returns for runners "reference", "other1", ..."""
    names = ["reference", *(f"other{i}" for i in range(1, len(runs)))][: len(runs)]
    return RunResults(
        [
            (name, [IterationResult(outputs=o, runtime=0.0, runner_name=name) for o in iterations])
            for name, iterations in zip(names, runs, strict=True)
        ]
    )


def problems(wanted: Any, found: Any) -> list[str | None]:
    """Problems of one iteration, by output; arrays stand for a single output "x"."""
    pair = [value if isinstance(value, dict) else {"x": value} for value in (wanted, found)]
    rows = _comparison.compare_results(results([pair[0]], [pair[1]]), {"other1": LIMIT})
    return [row.problem for row in rows]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# ------------------------------------------------------------------------------- the comparison itself


@pytest.mark.parametrize(("wanted", "found"), [(100000, 100001), (128799, 128800), (5, 6)])
def test_token_ids_one_apart(wanted: int, found: int) -> None:
    """CMP-1: default tolerances take 100000 and 100001 as equal."""
    assert problems(ids(7, wanted), ids(7, wanted)) == [None]
    assert problems(ids(7, wanted), ids(7, found)) == [
        f"iteration 0: differs by {1 / max(7, wanted):.1e}, limit 0.0e+00, in 1 of 1 rows"
    ]


def test_empty_outputs() -> None:
    """CMP-2: arrays without elements agree on nothing."""
    assert problems(np.zeros((0, 4)), np.zeros((0, 4))) == ["iteration 0: empty, shape [0, 4]"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], r"0 runner\(s\) gave results"),
        ([[{"x": ids(1)}]], r"1 runner\(s\) gave results .*expected at least two"),
        ([[], []], "reference gave outputs .*at least one iteration"),
        ([[{}], [{}]], "reference gave outputs .*at least one output in each"),
        ([[{"x": ids(1)}, {}], [{"x": ids(1)}, {}]], "at least one output in each"),
    ],
)
def test_nothing_to_compare(runs: list[list[dict[str, Any]]], message: str) -> None:
    """CMP-2: one runner, no iterations, no outputs."""
    with pytest.raises(_comparison.ComparisonError, match=message):
        _comparison.compare_results(results(*runs), {"other1": LIMIT})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_iterations(count: int) -> None:
    """CMP-2: a runner that stopped early, or ran too long."""
    rows = _comparison.compare_results(results([{"x": ids(1)}] * 2, [{"x": ids(1)}] * count), {"other1": LIMIT})
    assert [row.problem for row in rows] == [f"{count} iterations, expected 2"]


def test_every_runner_and_iteration_counts() -> None:
    good, bad = {"x": floats(1, 2)}, {"x": floats(1, 3)}
    rows = _comparison.compare_results(
        results([good, good], [good, good], [good, bad], [bad, good]), {f"other{i}": LIMIT for i in (1, 2, 3)}
    )
    assert [row.passed for row in rows] == [True, False, False]
    assert rows[1].problem == "iteration 1: differs by 5.0e-01, limit 1.0e-05, in 1 of 1 rows"
    assert rows[1].max_absolute == 1.0


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([1, NOTHING, np.inf, -np.inf, 4], None),
        ([1, 2, np.inf, -np.inf, 4], "NaN at other places (1 of 5 elements)"),
        ([NOTHING, NOTHING, np.inf, -np.inf, 4], "NaN at other places (1 of 5 elements)"),
        ([1, NOTHING, 3, -np.inf, 4], "+inf at other places (1 of 5 elements)"),
        ([1, NOTHING, np.inf, np.inf, 4], "+inf at other places (1 of 5 elements)"),
        ([1, NOTHING, np.inf, -3e38, 4], "-inf at other places (1 of 5 elements)"),
        ([1, NOTHING, np.inf, -np.inf, 4.1], "differs by 2.5e-02, limit 1.0e-05, in 1 of 1 rows"),
    ],
)
def test_masked_values(found: list[float], problem: str | None) -> None:
    """CMP-3: the same NaN and infinities are equal, others are not, and the finite rest is still compared."""
    expected = problem and f"iteration 0: {problem}"
    assert problems(floats(1, NOTHING, np.inf, -np.inf, 4), floats(*found)) == [expected]


def test_nothing_but_masked_values() -> None:
    """CMP-3: a row that is masked as a whole."""
    assert problems(floats(-np.inf, -np.inf), floats(-np.inf, -np.inf)) == [None]
    assert problems(floats(-np.inf, -np.inf), floats(-np.inf, 0)) != [None]


def test_missing_renamed_and_surplus_outputs() -> None:
    """CMP-4: Polygraphy skips the first and matches the second by position."""
    both = {"tokens": ids(1), "tokens_out": ids(1)}
    missing = "iteration 0: other1 has no such output"
    assert problems(both, {"tokens": ids(1)}) == [None, missing]
    assert problems({"tokens": ids(1)}, {"token": ids(1)}) == [
        missing,
        "iteration 0: the reference has no such output",
    ]
    assert problems({"tokens": ids(1)}, both) == [None, "iteration 0: the reference has no such output"]


@pytest.mark.parametrize(
    ("wanted", "found", "problem"),
    [
        (floats(1), ids(1), "dtype int32, expected float32"),
        (ids(1), np.array([1], np.int64), "dtype int64, expected int32"),
        (torch.ones(1, dtype=torch.bfloat16), floats(1), "dtype float32, expected bfloat16"),
        (floats(1, 2), floats(1, 2).reshape(2, 1), "shape [2, 1], expected [2]"),
        (floats(1, 1), floats(1), "shape [1], expected [2]"),
    ],
)
def test_other_dtypes_and_shapes(wanted: Any, found: Any, problem: str) -> None:
    assert problems(wanted, found) == [f"iteration 0: {problem}"]


def test_a_limit_is_a_share_of_the_largest_value() -> None:
    """A small element beside large ones may be off by more than its own share; an all-zero output may not."""
    assert problems(floats(1000, 0.001), floats(1000, 0.002)) == [None]
    assert problems(floats(1000, 0.001), floats(1000, 0.1)) != [None]
    assert problems(floats(0, 0), floats(0, 2e-5)) != [None]


def test_the_rows_beyond_the_limit_are_counted() -> None:
    """CMP-6: one row at another expert, and a kernel that is off everywhere, may have the same largest difference."""
    wanted = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    one = wanted.copy()
    one[1, 2, 0] += 12
    assert problems(wanted, one) == ["iteration 0: differs by 5.0e-01, limit 1.0e-05, in 1 of 6 rows"]
    assert problems(wanted, wanted + 12) == ["iteration 0: differs by 5.0e-01, limit 1.0e-05, in 6 of 6 rows"]


# --------------------------------------------------------------------------------- data and runners


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, inputs and outputs of a comparison of the trained draft, which must have succeeded."""
    directory = tmp_path_factory.mktemp("saved")
    arguments = ["--checkpoint", str(CHECKPOINT), "--numerics", "dequantized", "--networks", "draft"]
    assert compare_accuracy.main([*arguments, "--num-prompts", "2", "--save", str(directory)]) == 0
    return directory / "dequantized"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "tp1"
    convert_checkpoint(CHECKPOINT, path, tp_size=1)
    return path


@pytest.fixture(scope="module")
def sessions(shards: Path) -> dict[str, TorchSession]:
    """The trained networks as they are compared."""
    build = build_of(shards)
    kinds: tuple[Kind, ...] = ("draft", "target")
    return {kind: TorchSession(load_network(kind, shards, 0, build), SingleProcess()) for kind in kinds}


@pytest.fixture(scope="module")
def session(sessions: dict[str, TorchSession]) -> TorchSession:
    return sessions["draft"]


def build_of(shards: Path) -> BuildConfig:
    build = BuildConfig(numerics=Numerics.DEQUANTIZED, dtype="float32", max_batch_size=2)
    return build.checked(read_shard_config(shards).draft)


def test_recorded_inputs_are_real(shards: Path, sessions: dict[str, TorchSession]) -> None:
    """CMP-5: ids in the vocabulary, positions and slots that belong together, finite features; all calls
    from the prefill on. (Random data would be out of range, or NaN.)"""
    prompts = [[256, *text.encode()] for text in ("It was a", "She had been so much")]
    source = read_shard_config(shards)
    feeds = compare_accuracy.record_feeds(sessions, source, build_of(shards), SingleProcess(), prompts)
    assert all(len(f) == compare_accuracy.CALLS for f in feeds.values())
    for kind, calls in feeds.items():
        for feed in calls:
            values = {name: _runners.to_tensor(value) for name, value in feed.items()}
            assert all(bool(v.isfinite().all()) for v in values.values() if v.is_floating_point())
            tokens = values["input_ids" if kind == "target" else "anchor_ids"]
            assert bool(((tokens >= 0) & (tokens < source.draft.vocab_size)).all())
            assert set(values["slots"].tolist()) <= {0, 1}
            rows = ("positions", "slots") if kind == "target" else ("feature_positions", "feature_slots")
            positions, slots = values[rows[0]], values[rows[1]]
            for slot in slots.unique():
                own = positions[slots == slot]
                assert own.tolist() == list(range(int(own[0]), int(own[0]) + len(own))), "consecutive"
                if kind == "draft":
                    anchor = values["positions"][values["slots"] == slot]
                    assert anchor.tolist() == [int(own[-1]) + 1], "the anchor is right after its context"
    sizes = [len(feed["positions"]) for feed in feeds["target"]]
    assert sizes[0] > 2 * 6 and set(sizes[1:]) == {2 * 6}, "a prefill, then steps of six rows per request"
    rings = [_runners.to_tensor(feed["kv_ring_0"]) for feed in feeds["draft"]]
    assert not rings[0].any() and rings[1].any(), "caches are as the call found them"


def test_a_model_runs_as_recorded(saved: Path, session: TorchSession) -> None:
    """The files of --save: the same inputs give the torch session's outputs again, to the bit."""
    feeds = load_json(str(saved / "draft_rank0_inputs.json"))
    kept = RunResults.load(str(saved / "draft_rank0_outputs.json"))
    again = Comparator.run([_runners.SessionRunner(session, "again")], data_loader=feeds)
    rows = _comparison.compare_results(RunResults([*kept, *again]), {"again": 0.0})
    assert [row.output for row in rows] == [o.name for o in session.io.outputs]
    assert all(row.passed for row in rows)


def test_polygraphys_own_command(saved: Path, tmp_path: Path) -> None:
    """The command line of the README on the saved files: passes, and fails with outputs that are wrong."""
    polygraphy = str(Path(sys.executable).with_name("polygraphy"))
    command = [polygraphy, "run", str(saved / "draft_rank0.onnx"), "--onnxrt"]
    command += ["--load-inputs", str(saved / "draft_rank0_inputs.json")]
    tolerances = ["--check-error-stat", "max", "--atol", "1e-4", "draft_tokens:0", "--rtol", "1e-5", "draft_tokens:0"]

    def run(outputs: Path) -> int:
        done = subprocess.run([*command, "--load-outputs", str(outputs), *tolerances], capture_output=True, check=False)
        return done.returncode

    assert run(saved / "draft_rank0_outputs.json") == 0
    kept = RunResults.load(str(saved / "draft_rank0_outputs.json"))
    (_, iterations), *_ = kept
    wrong = [{**dict(i.items()), "confidence": i["confidence"] + np.float32(1e-2)} for i in iterations]
    results(wrong).save(str(tmp_path / "wrong.json"))
    assert run(tmp_path / "wrong.json") == 1


# ----------------------------------------------------------------------------------- broken kernels


def broken(name: str, change: Callable[[Any], Any]) -> dict[str, Op]:
    """All operations, ``name`` with its results changed."""
    op = ALL_OPS[name]

    def reference(self: Op, attributes: Any, *tensors: Tensor, **more: Any) -> Any:
        return change(op.reference(attributes, *tensors, **more))

    return {**ALL_OPS, name: type(f"Broken{name}", (type(op),), {"reference": reference})()}


BREAKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "comb transposed": ("MhcCoefficients", lambda r: (r[0], r[1], r[2].transpose(1, 2).contiguous())),
    "pre a percent off": ("MhcCoefficients", lambda r: (r[0] * 1.01, *r[1:])),
    "one collapsed channel": ("HcCollapse", lambda r: torch.cat((r[:, :1] + 1, r[:, 1:]), -1)),
    "a ring row missing": ("ContextKvInsert", lambda r: r.index_fill(1, torch.tensor([3]), 0)),
    "NaN in attention": ("DraftAttention", lambda r: r.index_fill(2, torch.tensor([0]), NOTHING)),
    "the second best token": ("MarkovSampling", lambda r: (r[0] + 1, *r[1:])),
}


def evaluate(saved: Path, session: TorchSession, ops: Iterable[Op]) -> list[Any]:
    feeds = load_json(str(saved / "draft_rank0_inputs.json"))[:2]
    runner = _runners.PluginReferenceRunner(saved / "draft_rank0.onnx", session.io, SingleProcess(), ops)
    found = Comparator.run([_runners.SessionRunner(session, "torch"), runner], data_loader=feeds)
    return _comparison.compare_results(found, {"plugin-references": LIMIT})


def test_intact_references_agree(saved: Path, session: TorchSession) -> None:
    assert all(row.passed for row in evaluate(saved, session, ALL_OPS.values()))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_reference_is_seen(saved: Path, session: TorchSession, fault: str) -> None:
    """CMP-6: a deliberately broken operation turns the comparison red."""
    rows = evaluate(saved, session, broken(*BREAKS[fault]).values())
    assert not all(row.passed for row in rows)


def test_the_exit_status_of_a_failed_comparison(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CMP-6: a comparator printed FAIL and exited with 0."""
    monkeypatch.setattr(_runners, "ALL_OPS", broken(*BREAKS["comb transposed"]))
    arguments = ["--checkpoint", str(CHECKPOINT), "--numerics", "dequantized", "--networks", "draft"]
    assert compare_accuracy.main([*arguments, "--num-prompts", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: " in printed
    assert "outputs differ" in printed and "all outputs agree" not in printed


def test_an_operation_without_a_reference(saved: Path, session: TorchSession) -> None:
    """It must not be evaluated by its own ONNX function, which is another runner's business."""
    rest = [op for name, op in ALL_OPS.items() if name != "HcCollapse"]
    with pytest.raises(NotImplementedError, match="HcCollapse"):
        _runners.PluginReferenceRunner(saved / "draft_rank0.onnx", session.io, SingleProcess(), rest)
