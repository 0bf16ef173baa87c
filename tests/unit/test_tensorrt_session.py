"""The TensorRT session: what it tells an engine, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspark_trt.builder.network import NetworkIO, TensorInfo
from dspark_trt.plugins.profiles import ShapeRangeError
from dspark_trt.plugins.tensorrt_api import EngineLoadError
from dspark_trt.runtime_py.session import SessionError
from dspark_trt.runtime_py.tensorrt_session import BindingError, EngineRunError, TensorRTSession

from tests.fake_tensorrt import MEMORY, DataType, FakeEngine, FakeRuntimeCache, fake_api

IO = NetworkIO(
    (
        TensorInfo("ids", torch.int32, ("T",)),
        TensorInfo("ring", torch.float16, (2, 8)),
    ),
    (TensorInfo("logits", torch.float32, ("T", 4)), TensorInfo("ring_out", torch.float16, (2, 8))),
    {"ring_out": "ring"},
)
RING = ((2, 8), (2, 8), (2, 8))
ADDRESSES = {"ids": 0x100, "ring": 0x200, "logits": 0x300, "ring_out": 0x200}
STREAM = 77


def make_engine(**options: Any) -> FakeEngine:
    """Profile 0 takes 1 to 6 rows, profile 1 up to 64."""
    ranges = [((1,), (6,), (6,)), ((1,), (32,), (64,))]
    inputs = {"ids": (DataType.INT32, ranges), "ring": (DataType.HALF, [RING, RING])}
    return FakeEngine(inputs, {"logits": DataType.FLOAT, "ring_out": DataType.HALF}, **options)


def make_session(engine: FakeEngine, **options: Any) -> TensorRTSession:
    return TensorRTSession(fake_api(engine=engine), engine, IO, name="the engine", **options)


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {"ids": (rows,), "ring": (2, 8)}


def test_what_did_not_change_is_bound_once() -> None:
    engine = make_engine()
    session = make_session(engine)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    told = engine.contexts[0].since()
    assert sorted(told[:-1]) == sorted(
        [("shape", name, shape) for name, shape in shapes(6).items()]
        + [("address", name, address) for name, address in ADDRESSES.items()]
    )
    assert told[-1] == ("execute", STREAM)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    assert engine.contexts[0].since() == [("execute", STREAM)]
    session.enqueue(shapes(5), {**ADDRESSES, "logits": 0x400}, STREAM)
    assert engine.contexts[0].since() == [("shape", "ids", (5,)), ("address", "logits", 0x400), ("execute", STREAM)]


def test_each_profile_has_its_context_and_is_chosen_on_the_stream_of_the_call() -> None:
    """ENG-3: the smallest profile that fits; a profile is set before anything else, in stream order."""
    engine = make_engine()
    session = make_session(engine)
    assert len(engine.contexts) == 2
    session.enqueue(shapes(7), ADDRESSES, STREAM)
    assert engine.contexts[1].since()[0] == ("profile", 1, STREAM)
    assert engine.contexts[0].since() == []
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    assert engine.contexts[0].since()[-1] == ("execute", STREAM)
    assert session.profiles[1]["ids"] == ((1,), (32,), (64,))


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_outside_every_profile_are_refused_before_anything_is_enqueued(rows: int) -> None:
    """ENG-3: with the range."""
    engine = make_engine()
    with pytest.raises(ShapeRangeError, match=rf"ids is \[{rows}\], expected \[1\] to \[6\].*\[1\] to \[64\]"):
        make_session(engine).enqueue(shapes(rows), ADDRESSES, STREAM)
    assert [context.told for context in engine.contexts] == [[], []]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ring_out": 0x500}, "ring_out and ring have different addresses; bind one, it is updated in place"),
        ({"logits": 0}, "logits has no address"),
        ({"logits": 0x310}, "logits is at 0x310, not aligned to 256 bytes"),
    ],
)
def test_addresses_that_an_engine_cannot_use_are_refused(changed: dict[str, int], message: str) -> None:
    """ENG-5: different addresses for the two names of one cache; TensorRT's alignment."""
    engine = make_engine()
    with pytest.raises(BindingError, match=message):
        make_session(engine).enqueue(shapes(6), {**ADDRESSES, **changed}, STREAM)
    assert engine.contexts[0].told == []


@pytest.mark.parametrize(
    ("method", "what"), [("execute", "a call"), ("address", "shapes or addresses"), ("shape", "shapes or addresses")]
)
def test_what_tensorrt_refuses_is_raised_with_its_words_and_forgotten(method: str, what: str) -> None:
    """One line: the sizes that the call chose, the profile that has them, TensorRT's words, and last what to do."""
    engine = make_engine()
    session = make_session(engine)
    engine.contexts[0].refuse = method
    with pytest.raises(EngineRunError) as caught:
        session.enqueue(shapes(6), ADDRESSES, STREAM)
    assert str(caught.value) == (
        f"the engine: tensorrt 8.6.0 refused {what} of ids [6], which profile 0 covers; it said: {method} does not "
        "work today; build the engines again with dspark-build, or use the torch backend"
    )
    engine.contexts[0].refuse = None
    engine.contexts[0].since()
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    again = engine.contexts[0].since()
    assert again[-1] == ("execute", STREAM)
    assert (("shape", "ids", (6,)) in again) == (method == "shape")
    assert any(call[0] == "address" for call in again) == (method != "execute")
    session.enqueue(shapes(6), ADDRESSES, STREAM, capturing=True)


def test_a_capture_needs_a_call_of_these_shapes_first() -> None:
    """GR-3: at once, and after a change of shape; nothing is enqueued into the capture."""
    engine = make_engine()
    session = make_session(engine)
    with pytest.raises(BindingError, match="can't be captured; run it once outside of a capture, with these shapes"):
        session.enqueue(shapes(6), ADDRESSES, STREAM, capturing=True)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    session.enqueue(shapes(5), ADDRESSES, STREAM)
    engine.contexts[0].since()
    with pytest.raises(BindingError, match="can't be captured"):
        session.enqueue(shapes(6), ADDRESSES, STREAM, capturing=True)
    assert engine.contexts[0].since() == []
    session.enqueue(shapes(5), ADDRESSES, STREAM, capturing=True)
    assert engine.contexts[0].since() == [("execute", STREAM)]


@pytest.mark.parametrize(("method", "rows"), [("address", 5), ("execute", 6)])
def test_a_call_that_failed_is_no_call_before_a_capture(method: str, rows: int) -> None:
    """GR-3: its shapes were set and its kernels never ran, or it failed where one had run before."""
    engine = make_engine()
    session = make_session(engine)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    engine.contexts[0].refuse = method
    with pytest.raises(EngineRunError):
        session.enqueue(shapes(rows), {**ADDRESSES, "logits": 0x400}, STREAM)
    engine.contexts[0].refuse = None
    with pytest.raises(BindingError, match="can't be captured"):
        session.enqueue(shapes(rows), ADDRESSES, STREAM, capturing=True)


def test_tensorrt_is_asked_whether_a_stream_can_be_captured() -> None:
    """Where it can be asked (TensorRT-RTX), its answer counts."""
    engine = make_engine(asks_for_capture=True)
    session = make_session(engine)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    with pytest.raises(BindingError, match="capture a stream on which TensorRT says it can"):
        session.enqueue(shapes(6), ADDRESSES, STREAM, capturing=True)
    engine.capturable_streams.add(STREAM)
    session.enqueue(shapes(6), ADDRESSES, STREAM, capturing=True)


def test_a_captured_context_serves_no_other_shapes() -> None:
    """GR-8: a graph goes on using its context's memory and what the context computed from the shapes."""
    engine = make_engine()
    session = make_session(engine)
    for rows in (6, 5):
        session.enqueue(shapes(rows), ADDRESSES, STREAM)
        session.enqueue(shapes(rows), ADDRESSES, STREAM, capturing=True)
    session.enqueue(shapes(4), ADDRESSES, STREAM)
    assert len(engine.contexts) == 4  # two captured, one free, one of the other profile
    first = [c for c in engine.contexts if ("shape", "ids", (6,)) in c.told]
    assert len(first) == 1 and [c for c in first[0].told if c[0] == "shape"] == [
        ("shape", "ids", (6,)),
        ("shape", "ring", (2, 8)),
    ]
    before = len(first[0].told)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    assert first[0].told[before:] == [("execute", STREAM)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.outputs.pop("logits"), "it has no output logits"),
        (lambda e: e.outputs.update(more=DataType.FLOAT), "it has an output more, which the network has not"),
        (lambda e: e.outputs.update(logits=DataType.HALF), "logits is float16, the network's is float32"),
        (lambda e: e.inputs.update(logits=e.inputs["ids"]), "it has an input logits, which the network has not"),
    ],
)
def test_an_engine_of_another_network_is_refused(change: Callable[[FakeEngine], object], message: str) -> None:
    """ENG-7 among them: marked intermediate outputs change what a compiler fuses, and are those of another network."""
    engine = make_engine()
    change(engine)
    with pytest.raises(EngineLoadError, match=f"the engine is not of this network: {message}.*build it again"):
        make_session(engine)


def test_an_engine_that_aliases_otherwise_is_refused() -> None:
    with pytest.raises(EngineLoadError, match="ring_out shares the memory of ids, in the network that of ring"):
        make_session(make_engine(aliases={"ring_out": "ids"}))
    make_session(make_engine(aliases={"ring_out": "ring"}))
    make_session(make_engine(aliases={}))  # no plugin told TensorRT


def test_an_input_that_nothing_reads_may_be_gone() -> None:
    engine = make_engine()
    extended = NetworkIO((*IO.inputs, TensorInfo("unused", torch.int32, ("T",))), IO.outputs, IO.aliases)
    session = TensorRTSession(fake_api(engine=engine), engine, extended)
    session.enqueue({**shapes(6), "unused": (6,)}, {**ADDRESSES, "unused": 0x700}, STREAM)
    assert ("address", "unused", 0x700) not in engine.contexts[0].told


def test_what_a_plugin_could_not_tell_is_told_first() -> None:
    """Faults that come up while the engine runs, long after the session was made."""
    engine, faults = make_engine(), list[str]()
    session = make_session(engine, faults=faults)
    session.enqueue(shapes(6), ADDRESSES, STREAM)
    faults.append("HcCollapse: CUDA refused the launch")
    engine.contexts[0].refuse = "execute"
    with pytest.raises(EngineRunError, match="said: HcCollapse: CUDA refused the launch; execute does not work"):
        session.enqueue(shapes(6), ADDRESSES, STREAM)


def test_without_memory_for_a_context_the_bytes_are_named() -> None:
    engine = make_engine()
    engine.room = 1
    with pytest.raises(EngineLoadError) as caught:
        make_session(engine)
    assert str(caught.value) == (
        f"the engine: tensorrt 8.6.0 made no execution context, which takes {MEMORY} bytes of device memory; it said: "
        "out of memory; free some, capture fewer --request-counts, or build for less"
    )


def test_tensors_that_are_not_on_a_gpu_are_refused() -> None:
    session = make_session(make_engine())
    ring = torch.zeros(2, 8, dtype=torch.float16)
    inputs = {"ids": torch.zeros(6, dtype=torch.int64), "ring": ring.t().contiguous().t()}
    with pytest.raises(SessionError) as caught:
        session.run(inputs, {"ring_out": ring})
    said = str(caught.value)
    assert "ids is torch.int64, expected torch.int32" in said
    assert "ids is contiguous on cpu, expected contiguous on a GPU" in said
    assert "ring is not contiguous on cpu, expected contiguous on a GPU" in said
    assert "output logits is missing, expected torch.float32 [6, 4]" in said
    assert "output ring_out must be bound to the tensor of ring" in said
    assert session.infer_shapes(shapes(3))["logits"].shape == (3, 4)
    with pytest.raises(SessionError, match="ids is missing"):
        session.infer_shapes({"ring": (2, 8)})


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from types import SimpleNamespace
from dspark_trt.plugins import tensorrt_api
from dspark_trt.runtime_py.tensorrt_session import TensorRTSession

def tensor(name, dtype):
    return SimpleNamespace(name=name, dtype=dtype)

context = SimpleNamespace(
    active_optimization_profile=0, set_input_shape=lambda *a: True, set_tensor_address=lambda *a: True,
    execute_async_v3=lambda stream: print("enqueued on", stream) or True,
)
engine = SimpleNamespace(
    num_io_tensors=2, num_optimization_profiles=1, device_memory_size=1,
    get_tensor_name=lambda i: "xy"[i], create_execution_context=lambda: context,
    get_tensor_mode=lambda name: SimpleNamespace(name={"x": "INPUT", "y": "OUTPUT"}[name]),
    get_tensor_dtype=lambda name: SimpleNamespace(name="HALF"),
    get_tensor_profile_shape=lambda name, index: [(1, 4), (2, 4), (8, 4)],
)
module = SimpleNamespace(ILogger=type("ILogger", (), {"__init__": lambda self: None}))
api = tensorrt_api.TensorRT(module, "tensorrt", "8.6.0", tensorrt_api._make_log(module))
io = SimpleNamespace(inputs=[tensor("x", "float16")], outputs=[tensor("y", "float16")], aliases={})
TensorRTSession(api, engine, io).enqueue({"x": (3, 4)}, {"x": 256, "y": 512}, 5)
"""


def test_the_core_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "enqueued on 5\n"), done.stderr


@pytest.mark.parametrize(("stored", "warned"), [(None, False), (b"good", False), (b"of another driver", True)])
def test_compiled_kernels_are_kept_beside_the_engine(
    stored: bytes | None, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorRT-RTX compiles at run time; what it compiled goes to the file, and comes from it if it fits."""
    engine, path = make_engine(asks_for_capture=True), tmp_path / "rank0.engine.kernels"
    caches: list[Any] = []
    config = SimpleNamespace(
        create_runtime_cache=lambda: FakeRuntimeCache(b"good"), set_runtime_cache=lambda cache: caches.append(cache)
    )
    engine.create_runtime_config = lambda: config  # type: ignore[attr-defined]
    if stored is not None:
        path.write_bytes(stored)
    api = fake_api("1.7.1.116", "tensorrt_rtx", engine=engine)
    session = TensorRTSession(api, engine, IO, runtime_cache=path)
    assert config.dynamic_shapes_kernel_specialization_strategy == "eager"
    assert [context.config for context in engine.contexts] == [config, config]
    assert ("kernels are compiled again" in caplog.text) == warned
    session.save_runtime_cache()
    assert path.read_bytes() == (b"good+" if stored == b"good" else b"+")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_compiled_kernels_that_cannot_be_kept_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    config = SimpleNamespace(create_runtime_cache=lambda: FakeRuntimeCache(b""), set_runtime_cache=lambda cache: None)
    engine.create_runtime_config = lambda: config  # type: ignore[attr-defined]
    api = fake_api("1.7.1.116", "tensorrt_rtx", engine=engine)
    TensorRTSession(api, engine, IO, runtime_cache=tmp_path / "gone" / "kernels").save_runtime_cache()
    assert "compiled kernels are not kept, the next start takes as long as this one" in caplog.text
