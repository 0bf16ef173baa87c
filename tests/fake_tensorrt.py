"""A TensorRT without kernels: engines that remember what they were told, for tests of what drives them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from dspark_trt.plugins.op import DOMAIN
from dspark_trt.plugins.profiles import Shape
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.tensorrt_api import TensorRT, _make_log

DataType = Enum("DataType", "FLOAT HALF INT8 INT32 BOOL")
Severity = Enum("Severity", "ERROR WARNING")
MEMORY = 123_000_000


class FakeContext:
    """Records calls as (method, arguments...)."""

    def __init__(self, engine: FakeEngine, config: Any = None):
        self.engine, self.config = engine, config
        self.active_optimization_profile = 0 if not engine.contexts else -1
        self.told: list[tuple[Any, ...]] = []
        self.refuse: str | None = None
        """A method that fails."""
        if engine.asks_for_capture:
            self.is_stream_capturable = lambda stream: stream in engine.capturable_streams

    def _answer(self, *call: Any) -> bool:
        self.told.append(call)
        if self.refuse == call[0]:
            self.engine.log.log(Severity.ERROR, f"{call[0]} does not work today")
        return self.refuse != call[0]

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.active_optimization_profile = index
        return self._answer("profile", index, stream)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        return self._answer("shape", name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        return self._answer("address", name, address)

    def execute_async_v3(self, stream: int) -> bool:
        return self._answer("execute", stream)

    def since(self) -> list[tuple[Any, ...]]:
        """The calls since the last question."""
        told, self.told = self.told, []
        return told


class FakeEngine:
    """An ``ICudaEngine``: inputs and outputs are name -> (type, one (min, opt, max) a profile)."""

    def __init__(
        self,
        inputs: dict[str, tuple[DataType, Sequence[tuple[Shape, Shape, Shape]]]],
        outputs: dict[str, DataType],
        *,
        asks_for_capture: bool = False,
        aliases: dict[str, str] | None = None,
    ):
        self.inputs, self.outputs, self.asks_for_capture = inputs, outputs, asks_for_capture
        self.capturable_streams: set[int] = set()
        self.contexts: list[FakeContext] = []
        self.room = 100
        self.device_memory_size = MEMORY
        self.log: Any = None
        if aliases is not None:
            self.get_aliased_input_tensor = aliases.get

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(next(iter(self.inputs.values()))[1])

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name="INPUT" if name in self.inputs else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.inputs[name][0] if name in self.inputs else self.outputs[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        return list(self.inputs[name][1][profile])

    def create_execution_context(self, config: Any = None) -> FakeContext | None:
        if len(self.contexts) == self.room:
            self.log.log(Severity.ERROR, "out of memory")
            return None
        self.contexts.append(FakeContext(self, config))
        return self.contexts[-1]


class FakeRuntimeCache:
    def __init__(self, accepted: bytes):
        self.accepted, self.content = accepted, b""

    def deserialize(self, data: bytes) -> bool:
        self.content = data if data == self.accepted else b""
        return data == self.accepted

    def serialize(self) -> bytes:
        return self.content + b"+"


def fake_api(
    version: str = "8.6.0", product: str = "tensorrt", *, engine: FakeEngine | None = None, says: str = ""
) -> TensorRT:
    """A TensorRT whose runtime loads ``engine``, or logs ``says`` and loads nothing."""
    module: Any = SimpleNamespace(ILogger=type("ILogger", (), {"__init__": lambda self: None}))
    creators = [
        SimpleNamespace(name=op.name, plugin_version=str(op.version), plugin_namespace=DOMAIN)
        for op in ALL_OPS.values()
    ]
    registry = SimpleNamespace(plugin_creator_list=creators, all_creators=creators)
    module.get_plugin_registry = lambda: registry
    log = _make_log(module)
    if engine is not None:
        engine.log = log

    def deserialize(plan: bytes) -> FakeEngine | None:
        if engine is None:
            log.log(Severity.ERROR, says)
        return engine

    module.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=deserialize)
    module.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
    return TensorRT(module, product, version, log)
