"""Calls kernels the hard way: poisoned outputs between guard bands, scratch memory full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dspark_trt.plugins.kernels import launch, workspace_bytes
from dspark_trt.plugins.op import Op
from dspark_trt.runtime_py.cuda_graphs import count_nodes
from torch import Tensor

GUARD_BYTES = 256
_DTYPES = {"float32": torch.float32, "int32": torch.int32, "int8": torch.int8}


class KernelCall:
    """One operation on given inputs, with its own outputs and scratch; :meth:`launch` may be captured.

    Outputs start as bytes of ones, which is NaN in every float type.
    """

    def __init__(self, op: Op, inputs: Sequence[Tensor], **attributes: Any):
        self.op, self.attributes = op, op.attributes_type(**attributes)
        self.inputs = list(inputs)
        bindings = op.bind(self.attributes, self.inputs)
        activation = bindings.get("T", torch.float32)
        self.activation = str(activation).removeprefix("torch.")
        self.sizes = {k: int(v) for k, v in bindings.items() if k != "T"}
        device = self.inputs[0].device
        self._buffers: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.pointers = {s.name: t.data_ptr() for s, t in zip(op.inputs(self.attributes), inputs, strict=True)}
        for spec in op.outputs(self.attributes):
            shape = [d if isinstance(d, int) else bindings[d] for d in spec.dims]
            dtype = activation if spec.dtype == "T" else _DTYPES[spec.dtype]
            size = torch.Size(shape).numel() * dtype.itemsize
            buffer = torch.empty(size + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
            output = buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)
            self._buffers.append(buffer)
            self.outputs.append(output)
            self.pointers[spec.name] = buffer.data_ptr() + GUARD_BYTES
        scratch = workspace_bytes(op, self.attributes, self.activation, self.sizes)
        self._workspace = torch.empty(scratch + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        self.poison()

    def poison(self) -> None:
        for buffer in (*self._buffers, self._workspace):
            buffer.fill_(0xFF)

    def launch(self) -> None:
        """Enqueue the kernel on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        workspace = self._workspace.data_ptr() + GUARD_BYTES
        launch(self.op, self.attributes, self.activation, self.sizes, self.pointers, workspace, stream)

    def run(self) -> list[Tensor]:
        """Launch, wait, look at the guard bands, return the outputs."""
        # Constants may be read before the kernels ahead in the stream have ended, so those must have.
        torch.cuda.synchronize()
        self.launch()
        torch.cuda.synchronize()
        for buffer in (*self._buffers, self._workspace):
            for band in (buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:]):
                assert bool((band == 0xFF).all()), f"{self.op.name} wrote outside an output or its workspace"
        return self.outputs


def call(op: Op, inputs: Sequence[Tensor], **attributes: Any) -> list[Tensor]:
    """The outputs of one call."""
    return KernelCall(op, inputs, **attributes).run()


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def capture(*calls: KernelCall) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls in order, and the number of its nodes."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for one in calls:
            one.launch()
    nodes = count_nodes(graph)
    graph.instantiate()
    return graph, nodes
