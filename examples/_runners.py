"""Polygraphy runners for the package's executors, and the recording of what a session is given."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from dspark_trt.builder.network import NetworkIO
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.op import DOMAIN, Op, decode_attributes
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.session import Session, make_outputs
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from torch import Tensor

MAILBOX = "mailbox"
Feed = OrderedDict[str, Any]
"""Input name -> numpy array, or torch tensor for bfloat16, which numpy has not."""


def to_feed(tensor: Tensor) -> Any:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class RecordingSession:
    """A session that keeps copies of the inputs of its first ``calls`` calls."""

    def __init__(self, session: Session, calls: int):
        self.session, self.io, self.calls = session, session.io, calls
        self.infer_shapes = session.infer_shapes
        self.feeds: list[Feed] = []

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if len(self.feeds) < self.calls:
            # A mailbox is the session's own; the references gather without it, but the graph names it.
            empty = {i.name: torch.zeros(i.shape, dtype=i.dtype) for i in self.io.inputs if i.name == MAILBOX}
            self.feeds.append(OrderedDict((n, to_feed(t.clone())) for n, t in {**inputs, **empty}.items()))
        self.session.run(inputs, outputs)


class SessionRunner(BaseRunner):
    """A session of the runtime as a Polygraphy runner; its caches are copied, not updated in place.

    Args:
        device: where the session takes its tensors; feeds and results are on the CPU.
        check: raises if what the session computed is void; asked after every call.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        device: torch.device | str = "cpu",
        check: Callable[[], None] = lambda: None,
    ):
        super().__init__(name=name)
        self.session, self.check, self.device = session, check, torch.device(device)
        # TensorRT wants a stream that is not the default one.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def get_input_metadata_impl(self) -> TensorMetadata:
        return input_metadata(self.session.io)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Any]:
        # The mailbox of a feed stands for the graph's input; a session has its own.
        feed = {name: to_tensor(value) for name, value in feed_dict.items() if name != MAILBOX}
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            inputs = {name: tensor.to(self.device, copy=True) for name, tensor in feed.items()}
            outputs = make_outputs(self.session, inputs, inputs)
            self._synchronize()
            started = time.perf_counter()
            self.session.run(inputs, outputs)
            self._synchronize()
            self.inference_time = time.perf_counter() - started
        self.check()
        return OrderedDict((info.name, to_feed(outputs[info.name].cpu())) for info in self.session.io.outputs)

    def _synchronize(self) -> None:
        if self.stream:
            self.stream.synchronize()


class PluginReferenceRunner(BaseRunner):
    """Evaluates an exported model node by node, ``dspark`` nodes by the references of ``ops``."""

    def __init__(self, path: Path, io: NetworkIO, communicator: Communicator, ops: Iterable[Op] | None = None):
        super().__init__(name="plugin-references")
        self.io, self.communicator = io, communicator
        references = [reference_class(op) for op in (ALL_OPS.values() if ops is None else ops)]
        model = onnx.load(path)
        # Without the functions, an operation that has no reference is an error and not evaluated by its body.
        del model.functions[:]
        self.evaluator = ReferenceEvaluator(model, new_ops=[*references, GatherElements, MatMul])

    def get_input_metadata_impl(self) -> TensorMetadata:
        return input_metadata(self.io)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        with torch.inference_mode(), collective_scope(self.communicator.all_gather):
            outputs = self.evaluator.run(None, {name: to_numpy(to_tensor(v)) for name, v in feed_dict.items()})
        self.inference_time = time.perf_counter() - started
        return OrderedDict((o.name, to_feed(to_tensor(v))) for o, v in zip(self.io.outputs, outputs, strict=True))


def reference_class(op: Op) -> type[OpRun]:
    """``op`` as a class that ``onnx.reference`` instantiates for its nodes."""

    def _run(self: OpRun, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        # The evaluator hands floats over as numpy scalars.
        plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in attributes.items()}
        results = op.reference(decode_attributes(op, plain), *map(to_tensor, inputs))
        return tuple(map(to_numpy, results if isinstance(results, tuple) else (results,)))

    return type(op.name, (OpRun,), {"op_domain": DOMAIN, "_run": _run})


class GatherElements(OpRun):
    """In place of the evaluator's own, which takes no negative axis."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (np.take_along_axis(data, indices, axis),)


class MatMul(OpRun):
    """In place of the evaluator's own, which rounds after each term of a 16-bit product."""

    op_domain = ""

    def _run(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
        wide = np.float32 if a.dtype == np.float32 else np.float64
        return (np.matmul(a.astype(wide), b.astype(wide)).astype(a.dtype),)


def input_metadata(io: NetworkIO) -> TensorMetadata:
    metadata = TensorMetadata()
    for info in io.inputs:
        metadata.add(info.name, info.dtype, [d if isinstance(d, int) else None for d in info.shape])
    return metadata
