"""The Polygraphy comparison's runner of engines: when there is one, what it is given, and what its faults do.

Engines are played by torch sessions: the choice of TensorRT and the loading of a plan are replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig, Lowering
from dspark_trt.builder.config import ConfigError, Numerics
from dspark_trt.builder.engine_dir import WEIGHTS, EngineDir
from dspark_trt.builder.network import Kind, NetworkIO, TensorInfo, load_network
from dspark_trt.runtime_py import backend
from dspark_trt.runtime_py.backend import Backend, Executor, choose_executor
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from dspark_trt.runtime_py.device import Platform
from dspark_trt.runtime_py.mailbox import MailboxError
from dspark_trt.runtime_py.session import TorchSession, infer_shapes
from polygraphy.comparator import Comparator
from torch import Tensor

from tests.example_scripts import load_example
from tests.placeholder_engines import make_engines
from tests.thread_ranks import outcomes

_engines = load_example("_engines")
_runners = load_example("_runners")
compare_accuracy = load_example("compare_accuracy")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """Engines in float32 whose prefills take several calls."""
    sizes = {"max_batch_size": 2, "max_input_len": 64, "max_seq_len": 256}
    build: dict[str, Any] = {"numerics": Numerics.DEQUANTIZED, "dtype": "float32", **sizes}
    return EngineDir.open(make_engines(tmp_path_factory.mktemp("engines"), 1, **build))


class FakeMailbox:
    """Remembers what was asked of it."""

    def __init__(self, fault: str = ""):
        self.tensor, self.fault = torch.ones(2, 2, dtype=torch.int32), fault
        self.checks, self.closed = 0, False

    def check(self) -> None:
        self.checks += 1
        if self.fault:
            raise MailboxError(self.fault)

    def close(self) -> None:
        self.closed = True


class PlayedEngines:
    """TensorRT on every rank: torch sessions, whose confidence may be ``change``d, with ``mailbox`` beside them."""

    def __init__(self, patch: pytest.MonkeyPatch, mailbox: FakeMailbox, change: Callable[[Tensor], Any] | None = None):
        self.mailbox, self.change = mailbox, change
        self.opened: list[tuple[str, int, Any, int, Tensor]] = []
        self.given: list[set[str]] = []

        def choose(directory: EngineDir, communicator: Communicator, place: torch.device, backend: Backend) -> Executor:
            return (
                Executor("the api", place)
                if backend == "auto"
                else choose_executor(directory, communicator, place, backend)
            )

        patch.setattr(_engines, "choose_executor", choose)
        platform = Platform(CPU, mailbox=mailbox)
        patch.setattr(_engines, "open_engine_platform", lambda *_, peer_timeout_s: platform)
        patch.setattr(_engines, "open_session", self._open)

    def _open(
        self, directory: EngineDir, kind: Kind, rank: int, api: Any, *, world_size: int, mailbox: Tensor
    ) -> TorchSession:
        self.opened.append((kind, rank, api, world_size, mailbox))
        session = TorchSession(load_network(kind, directory.path / WEIGHTS, rank, directory.build), SingleProcess())
        run = session.run

        def changed(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
            self.given.append(set(inputs))
            run(inputs, outputs)
            if self.change:
                self.change(outputs["confidence"])

        session.run = changed
        return session


def compare(directory: EngineDir, *arguments: str) -> int:
    return compare_accuracy.main(["--engine-dir", str(directory.path), "--num-prompts", "2", *arguments])


# ----------------------------------------------------------------------------------------- the comparison


def test_engines_are_compared(
    directory: EngineDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every output of both networks has a row; prefill in parts and steps; what was opened is checked and closed."""
    engines = PlayedEngines(monkeypatch, FakeMailbox())
    assert compare(directory) == 0
    printed = capsys.readouterr().out
    draft, target = (load_network(k, directory.path / WEIGHTS, 0, directory.build).io for k in ("draft", "target"))
    for output in (*draft.outputs, *target.outputs):
        assert sum("│ tensorrt " in line and f"│ {output.name} " in line for line in printed.splitlines()) >= 1
    assert printed.count("│ tensorrt ") == len(draft.outputs) + len(target.outputs)
    assert "left out" not in printed and "all outputs agree" in printed
    assert engines.opened == [(kind, 0, "the api", 1, engines.mailbox.tensor) for kind in ("draft", "target")]
    # Two prompts of 120 tokens: two parts of a prefill and the three calls after it.
    assert "target: dequantized numerics, float32, 1 rank(s), 5 calls" in printed
    assert engines.mailbox.checks == len(engines.given) and engines.mailbox.closed


def test_engines_are_left_out_on_demand(
    directory: EngineDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As messages about engines advise."""
    engines = PlayedEngines(monkeypatch, FakeMailbox())
    assert compare(directory, "--networks", "draft", "--backend", "torch") == 0
    assert engines.opened == [] and "tensorrt left out: --backend torch" in capsys.readouterr().out


def test_engines_that_are_wrong(
    directory: EngineDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CMP-6: a row of one output; the others are still said to be right."""
    monkeypatch.setenv("COLUMNS", "160")
    PlayedEngines(monkeypatch, FakeMailbox(), change=lambda output: output[0].add_(1))
    assert compare(directory, "--networks", "draft") == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and "│ tensorrt " in failed[0] and "│ confidence " in failed[0]
    assert "FAILED: iteration 0: differs by " in failed[0] and "limit 2.0e-05, in 1 of 2 rows" in failed[0]


def test_void_results_are_no_results(directory: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gave up waiting for another rank; closing would wait for that rank too."""
    engines = PlayedEngines(monkeypatch, FakeMailbox("rank 1 sent nothing"))
    monkeypatch.setattr(_engines, "open_session", lambda *_, **__: Doubling())
    with (
        pytest.raises(MailboxError, match="rank 1 sent nothing"),
        _engines.open_engines(directory, directory.build, SingleProcess()) as opened,
    ):
        Comparator.run([opened.runner("draft")], data_loader=[feed()])
    assert engines.mailbox.checks == 1 and not engines.mailbox.closed


# ------------------------------------------------------------------------------- when they are left out


def test_without_tensorrt_the_others_are_compared(directory: EngineDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(directory, "--networks", "draft") == 0
    printed = capsys.readouterr().out
    assert "tensorrt left out: its plans need tensorrt_rtx 0.0.0.0" in printed or (
        "tensorrt left out: its plans, of tensorrt_rtx 0.0.0.0, need a GPU of compute capability 8.9" in printed
    )
    assert "│ tensorrt " not in printed and "│ plugin-references " in printed and "│ onnxruntime " in printed


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ""),
        ({"numerics": "dequantized", "dtype": "float32"}, ""),
        ({"numerics": "released"}, "released in bfloat16"),
        ({"dtype": "float16"}, "dequantized in float16"),
    ],
)
def test_other_numerics_than_the_engines(
    options: dict[str, Any], found: str, directory: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine compared with a reference in other numerics would differ, and not be wrong."""
    played = PlayedEngines(monkeypatch, FakeMailbox())
    build = compare_accuracy.build_asked_for(compare_accuracy.Options(**options), directory.build)
    with _engines.open_engines(directory, build, SingleProcess()) as engines:
        if found:
            reason = (
                f"its engines compute dequantized numerics in float32, not {found}; leave --numerics and --dtype out"
            )
            assert isinstance(engines, str) and engines.startswith(reason)
        else:
            assert engines.directory is directory
    assert played.mailbox.closed is not bool(found), "what is not used is not opened"


@pytest.mark.parametrize(
    ("built", "asked", "expected"),
    [
        (("dequantized", "float16"), (None, None), ("dequantized", "float16")),
        (("dequantized", "float16"), ("dequantized", None), ("dequantized", "float16")),
        (("dequantized", "float16"), (None, "float32"), ("dequantized", "float32")),
        (("dequantized", "float16"), ("released", None), ("released", "bfloat16")),
        (("released", "bfloat16"), (None, None), ("released", "bfloat16")),
        (("released", "bfloat16"), ("dequantized", None), ("dequantized", "float32")),
    ],
)
def test_what_is_compared_of_an_engine_directory(
    built: tuple[str, Any], asked: tuple[Any, Any], expected: tuple[str, str], directory: EngineDir
) -> None:
    """Without options the directory's own; native engines have no released numerics, and torch still has."""
    lowering = Lowering.NATIVE if built[0] == "dequantized" else Lowering.PLUGIN
    build = BuildConfig(numerics=Numerics(built[0]), dtype=built[1], lowering=lowering, max_batch_size=3)
    options = compare_accuracy.Options(numerics=asked[0], dtype=asked[1])
    found = compare_accuracy.build_asked_for(options, build)
    try:
        found.checked(directory.draft)
    except ConfigError as error:
        pytest.fail(str(error))
    assert (found.numerics.value, found.dtype, found.max_batch_size) == (*expected, 3)


def test_all_ranks_leave_them_out_together(directory: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank can't run them; a rank that went on alone would wait in its mailbox for ever."""
    reasons: list[Any] = [object(), "its GPU is another one"]
    monkeypatch.setattr(backend, "why_not_tensorrt", lambda *_: reasons.pop())

    def work(communicator: Communicator) -> str:
        with _engines.open_engines(directory, directory.build, communicator) as engines:
            return str(engines)

    assert outcomes(2, work, timeout_s=20) == ["its GPU is another one"] * 2


# ---------------------------------------------------------------------------------- a session as a runner


class Doubling:
    """A session of its own mailbox and one cache, that notes the devices and names of what it is given."""

    def __init__(self) -> None:
        rows = TensorInfo("rows", torch.float32, ("T", 2))
        cache = TensorInfo("kv", torch.bfloat16, (3, 2))
        mailbox = TensorInfo("mailbox", torch.int32, (2, 2))
        twice = TensorInfo("twice", torch.float32, ("T", 2))
        self.io = NetworkIO(
            (rows, cache, mailbox), (twice, TensorInfo("kv_out", torch.bfloat16, (3, 2))), {"kv_out": "kv"}
        )
        self.given: list[dict[str, Tensor]] = []

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        assert "mailbox" not in inputs
        return infer_shapes(self.io, {**inputs, "mailbox": (2, 2)})

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.given.append(dict(inputs))
        assert outputs["kv_out"] is inputs["kv"]
        outputs["twice"].copy_(2 * inputs["rows"])
        outputs["kv_out"].add_(1)


def feed() -> Any:
    # A bfloat16 cache is a tensor, which is not copied on its way from numpy.
    own = {"rows": np.ones((4, 2), np.float32), "kv": torch.zeros(3, 2, dtype=torch.bfloat16)}
    return OrderedDict(own, mailbox=np.zeros((2, 2), np.int32), unread=np.zeros(1, np.float32))


def test_a_session_is_given_its_inputs_and_no_others() -> None:
    """Not the feed's mailbox, whose addresses are zero, nor inputs that only another runner has."""
    session = Doubling()
    runner = _runners.SessionRunner(session, "doubling", "cpu")
    first, second = feed(), feed()
    ((_, iterations),) = Comparator.run([runner], data_loader=[first, second])
    assert [set(given) for given in session.given] == [{"rows", "kv"}] * 2
    assert all(t.is_contiguous() and t.device == CPU for given in session.given for t in given.values())
    for iteration in iterations:
        assert (iteration["twice"] == 2).all() and (iteration["kv_out"] == 1).all()
    assert not first["kv"].any(), "the feed's cache is copied, other runners need it as it was"


def test_the_time_of_a_call_is_that_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are over before the clock starts, and the call before it stops; what it computed is checked then."""
    events: list[str] = []
    session = Doubling()
    run = session.run

    def noted(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        events.append("run")
        run(inputs, outputs)

    monkeypatch.setattr(session, "run", noted)
    runner = _runners.SessionRunner(session, "doubling", check=lambda: events.append("check"))
    monkeypatch.setattr(runner, "_synchronize", lambda: events.append("synchronize"))
    ticks = iter((1.0, 3.5))

    def clock() -> float:
        events.append("clock")
        return next(ticks)

    monkeypatch.setattr(_runners.time, "perf_counter", clock)
    with runner:
        runner.infer_impl({name: value for name, value in feed().items() if name != "unread"})
        assert runner.last_inference_time() == 2.5
    assert events == ["synchronize", "clock", "run", "synchronize", "clock", "check"]
