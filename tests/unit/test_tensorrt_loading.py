"""How opening an engine ends: with a session, or in one message that says what differs and what to do."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspark_trt.builder.build_config import Lowering
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError, network_io
from dspark_trt.builder.network import TensorInfo
from dspark_trt.plugins import library
from dspark_trt.plugins.library import KernelUnavailableError
from dspark_trt.plugins.tensorrt_api import EngineLoadError, TensorRT
from dspark_trt.runtime_py import tensorrt_session
from dspark_trt.runtime_py.tensorrt_session import open_session

from tests.fake_tensorrt import DataType, FakeEngine, Severity, fake_api
from tests.placeholder_engines import make_engines


@pytest.fixture(scope="module")
def engine_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], EngineDir]:
    root = tmp_path_factory.mktemp("engines")
    made: dict[int, EngineDir] = {}

    def make(tp_size: int) -> EngineDir:
        if tp_size not in made:
            options = {"numerics": "dequantized", "dtype": "float16", "max_batch_size": 2}
            path = make_engines(root, tp_size, **options)
            header = json.loads((path / "config.json").read_text())
            changes = {"tensorrt": {"product": "tensorrt", "version": "8.6.0"}, "compute_capabilities": ["9.0"]}
            header.update(changes, kernels=True, plugins={"HcCollapse": 1})
            (path / "config.json").write_text(json.dumps(header))
            made[tp_size] = EngineDir.open(path)
        return made[tp_size]

    return make


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_session, "gpu_compute_capabilities", lambda: ["8.9", "9.0"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def loaded_plugins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The majors that plugins were loaded for."""
    majors: list[int] = []
    monkeypatch.setattr("dspark_trt.plugins.trt_plugin.load_trt_plugins", majors.append)
    return majors


def draft_engine(directory: EngineDir) -> FakeEngine:
    """An engine with the draft's inputs and outputs, of two profiles."""
    kinds = {"int32": DataType.INT32, "float32": DataType.FLOAT, "float16": DataType.HALF}
    io = network_io("draft", directory, directory.build)

    def kind(info: TensorInfo) -> DataType:
        return kinds[str(info.dtype).removeprefix("torch.")]

    def shape(info: TensorInfo) -> tuple[int, ...]:
        return tuple(1 if isinstance(d, str) else d for d in info.shape)

    inputs = {info.name: (kind(info), [(shape(info),) * 3] * 2) for info in io.inputs}
    return FakeEngine(inputs, {info.name: kind(info) for info in io.outputs})


def test_an_engine_is_opened_with_its_plugins(
    engine_dirs: Callable[[int], EngineDir], loaded_plugins: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """TensorRT 8 takes its plugins from the C++ library; all that the draft needs is there."""
    caplog.set_level(logging.INFO, "dspark_trt")
    directory = engine_dirs(1)
    session = open_session(directory, "draft", 0, fake_api(engine=draft_engine(directory)), world_size=1)
    assert loaded_plugins == [8]
    assert session.io == network_io("draft", directory, directory.build)
    assert "draft engine of rank 0: tensorrt 8.6.0, 2 profiles, 123.0 MB of memory per context" in caplog.text


def test_the_mailbox_is_the_session_s_own(engine_dirs: Callable[[int], EngineDir], loaded_plugins: list[int]) -> None:
    directory = engine_dirs(2)
    engine = draft_engine(directory)
    with pytest.raises(EngineLoadError, match="engines of 2 ranks reduce through a mailbox, none was given"):
        open_session(directory, "draft", 1, fake_api(engine=engine))
    assert loaded_plugins == []
    mailbox = torch.zeros(2, 2, dtype=torch.int32)
    session = open_session(directory, "draft", 1, fake_api(engine=engine), mailbox=mailbox)
    shapes = {i.name: tuple(1 if isinstance(d, str) else d for d in i.shape) for i in session.io.inputs}
    del shapes["mailbox"]
    assert "draft_tokens" in session.infer_shapes(shapes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"api": fake_api("10.14.1.48")}, "TensorRT version: built for 8.6.0, here 10.14.1.48. Install tensorrt 8.6.0"),
        (
            {"api": fake_api("1.7.1.116", "tensorrt_rtx")},
            "TensorRT product: built for tensorrt, here tensorrt_rtx; TensorRT version: built for 8.6.0, here",
        ),
        ({"world_size": 2}, "number of ranks: built for 1, here 2. Start it with: mpirun -n 1"),
    ],
)
def test_a_run_that_the_engines_do_not_fit_is_refused(
    engine_dirs: Callable[[int], EngineDir], changed: dict[str, Any], message: str
) -> None:
    """ENG-2: field, both values and the remedy, before the plan is read."""
    chosen = {"api": fake_api(says="this must not be asked"), **changed}
    with pytest.raises(EngineDirError) as caught:
        open_session(engine_dirs(1), "draft", 0, **chosen)
    assert message in str(caught.value) and "dspark-build --checkpoint" in str(caught.value)


def test_an_engine_for_another_gpu_is_refused(
    engine_dirs: Callable[[int], EngineDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complaint 2, NVIDIA/TensorRT#2176: of the GPU that this rank uses, in milliseconds."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(EngineDirError, match=r"compute capability: built for 9\.0, here 8\.9"):
        open_session(engine_dirs(1), "draft", 0, fake_api())
    monkeypatch.setattr(tensorrt_session, "gpu_compute_capabilities", list)
    with pytest.raises(EngineLoadError, match="engines run on a GPU, and torch finds none here; use the torch backend"):
        open_session(engine_dirs(1), "draft", 0, fake_api())


def test_a_damaged_plan_is_refused_before_tensorrt_sees_it(
    engine_dirs: Callable[[int], EngineDir], loaded_plugins: list[int]
) -> None:
    directory = engine_dirs(1)
    path = directory.path / "draft" / "rank0.engine"
    plan = path.read_bytes()
    path.write_bytes(plan[:-1] + b"?")
    try:
        with pytest.raises(EngineDirError, match="not the plan written for rank 0; copy it again"):
            open_session(directory, "draft", 0, fake_api(says="this must not be asked"))
    finally:
        path.write_bytes(plan)
    assert loaded_plugins == []


def test_native_engines_of_several_ranks_are_refused(engine_dirs: Callable[[int], EngineDir]) -> None:
    directory = engine_dirs(2)
    native = dataclasses.replace(directory, build=dataclasses.replace(directory.build, lowering=Lowering.NATIVE))
    with pytest.raises(EngineLoadError, match="TensorRT's own collectives, which this runtime does not drive"):
        open_session(native, "draft", 0, fake_api())


def test_a_missing_plugin_library_is_named(
    engine_dirs: Callable[[int], EngineDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complaint 6: which library, and how to get it."""
    monkeypatch.setattr(library, "find_library", lambda *name: None)
    with pytest.raises(KernelUnavailableError, match=r"libdspark_trt_plugins\.so was not found.*TENSORRT_INCLUDE_DIR"):
        open_session(engine_dirs(1), "draft", 0, fake_api())


def test_a_creator_that_nobody_registered_is_named(
    engine_dirs: Callable[[int], EngineDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-1: the triple that is wanted, what is registered, and the library that lacks it."""
    loaded = Path("/somewhere") / library.TRT_LIBRARY_NAME
    monkeypatch.setattr("dspark_trt.plugins.trt_plugin.load_trt_plugins", lambda major: loaded)
    api = fake_api()
    registry = api.module.get_plugin_registry()
    registry.plugin_creator_list[:] = [c for c in registry.plugin_creator_list if c.name != "HcCollapse"]
    with pytest.raises(EngineLoadError) as caught:
        open_session(engine_dirs(1), "draft", 0, api)
    assert "no plugin creator for HcCollapse version 1 namespace dspark" in str(caught.value)
    assert "registered in namespace dspark: ContextKvInsert version 1" in str(caught.value)
    assert str(caught.value).endswith(f"; plugin library: {loaded}; build that library again from cpp_plugins")
    assert library.LIBRARY_NAME not in str(caught.value)


@pytest.mark.usefixtures("loaded_plugins")
def test_a_plan_that_tensorrt_refuses_ends_in_its_words(engine_dirs: Callable[[int], EngineDir]) -> None:
    """One line, as an operator reads it: found, expected, what TensorRT said, and last what to do."""
    with pytest.raises(EngineLoadError) as caught:
        open_session(engine_dirs(1), "draft", 0, fake_api(says="serialized\n  with another version."))
    assert str(caught.value) == (
        "tensorrt 8.6.0 can't load this plan of 7 bytes, expected one that this version built for this GPU; it said: "
        "serialized with another version; build it again on this machine with dspark-build"
    )


def refusing(*messages: str) -> TensorRT:
    """A TensorRT that logs errors and loads nothing."""
    api = fake_api()

    def deserialize(plan: bytes) -> None:
        for message in messages:
            api.log.log(Severity.ERROR, message)

    api.module.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=deserialize)
    return api


@pytest.mark.usefixtures("loaded_plugins")
def test_what_a_plugin_found_wrong_is_said_once_and_first(engine_dirs: Callable[[int], EngineDir]) -> None:
    """Its words are the cause, TensorRT's what follows from it; on TensorRT 8 they come through the same log."""
    fault = "dspark.HcCollapse: the plan was built with plugin ABI 3, this library has 4; build it again"
    with pytest.raises(EngineLoadError) as caught:
        open_session(engine_dirs(1), "draft", 0, refusing("no plan", fault))
    assert f"; it said: {fault}; no plan; build it again on this machine" in str(caught.value)


def test_errors_outside_of_calls_are_logged_as_errors(caplog: pytest.LogCaptureFixture) -> None:
    """No exception will tell them; the next call's must not either. Those of a call that succeeds are warnings."""
    api = fake_api()
    api.log.log(Severity.ERROR, "between")
    api.log.log(Severity.WARNING, "chatter")
    with api.messages():
        api.log.log(Severity.ERROR, "within")
        assert api.error_text() == "within"
    with pytest.raises(EngineLoadError), api.messages():
        api.log.log(Severity.ERROR, "raised")
        raise EngineLoadError(api.error_text())
    shown = [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno > logging.DEBUG]
    assert shown == [("ERROR", "TensorRT: between"), ("WARNING", "tensorrt: within")]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "nothing"),
        (["a", "b", "a"], "a; b"),
        ([f"{i:0498d}" for i in range(7)], f"{0:0498d}; {1:0498d} (and 5 more)"),
        (["x" * 2000, "y"], f"{'x' * 1000}... (and 1 more)"),
    ],
)
@pytest.mark.usefixtures("loaded_plugins")
def test_a_flood_of_messages_ends_in_a_number(
    engine_dirs: Callable[[int], EngineDir], messages: list[str], said: str
) -> None:
    with pytest.raises(EngineLoadError, match=rf"; it said: {re.escape(said)}; build it again"):
        open_session(engine_dirs(1), "draft", 0, refusing(*messages))


def test_tensorrt_rtx_without_its_gpu_ends_in_one_message(
    api: TensorRT, engine_dirs: Callable[[int], EngineDir]
) -> None:
    """The real thing: it returns nothing and logs a line."""
    facts = {"product": "tensorrt_rtx", "version": api.version}
    directory = dataclasses.replace(engine_dirs(1), tensorrt=facts)
    with pytest.raises(
        EngineLoadError, match=r"^tensorrt_rtx 1\..* can't load this plan of 7 bytes, .*; it said: .+; build.*$"
    ):
        open_session(directory, "draft", 0, api)
