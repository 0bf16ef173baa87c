"""Writes a rank's network as one ONNX model.

The torch module is exported with dynamic request and row counts. Every custom operation becomes one
node of domain ``dspark`` and the model carries a local function of the same name that spells it in
standard ONNX, so the same file serves ONNX Runtime, a TensorRT parser with our plugin creators (the
nodes become plugins) and one without (the functions are inlined). Nodes are named after the modules
that computed them.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from ..plugins.op import DOMAIN, OPSET, Op, decode_attributes, node_attributes
from ..plugins.registry import ALL_OPS
from .model.draft import DraftModel
from .network import Network, TensorInfo

EXTERNAL_DATA_BYTES = 2_000_000_000
"""A protobuf holds less than 2 GiB; a larger model keeps its weights in a file beside it."""
_SCOPES = "pkg.torch.onnx.name_scopes"


class ExportError(RuntimeError):
    """The exported model is not what the network should have become."""


@dataclass(frozen=True)
class ExportedModel:
    """An ONNX file, its inputs, and how many nodes of each custom operation it has."""

    path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]
    plugin_counts: dict[str, int]


class Probes(dict[str, Tensor]):
    """Collects what a network's probe reports: pass ``Probes().record`` to ``load_network``.

    With a draft's ``block_size``, rows of its blocks are kept as [R, B, ...] instead of [R * B, ...].
    """

    def __init__(self, block_size: int | None = None):
        super().__init__()
        self._block_size = block_size

    def record(self, name: str, tensor: Tensor) -> None:
        if self._block_size and name.startswith("stage") and "_context_" not in name:
            tensor = tensor.unflatten(0, (-1, self._block_size))
        self[name] = tensor


class _WithProbes(nn.Module):
    """The network with its probed tensors as further outputs."""

    def __init__(self, network: Network, probes: Probes):
        super().__init__()
        self.network, self.probes = network, probes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.probes.clear()
        outputs = self.network(*tensors)
        return (*outputs, *(t.clone() for t in self.probes.values()))


def export_network(network: Network, path: Path, *, probes: Probes | None = None) -> ExportedModel:
    """Export ``network`` to ``path`` and attach the local functions.

    Args:
        probes: the collector that the network was loaded with; its tensors become outputs too, under
            the names of ``examples/dump_draft.py``. Extra outputs can change what a compiler fuses.

    Raises:
        ExportError: nodes of one operation differ in their attributes, or the draft chooses its tokens in a
            way that engines do not have.
        onnx.checker.ValidationError: the result is not a valid model.
    """
    if isinstance(network.model, DraftModel) and not network.model.plain_sampling:
        raise ExportError(
            f"the draft chooses its tokens with {network.model.markov}, a {network.model.config.markov_head} head, a "
            "transform of its logits or a sampler of its own, engines have the released Markov head only; run it with "
            "the torch session"
        )
    io = network.io
    examples, dynamic = _example_inputs(io.inputs)
    module: nn.Module = network if probes is None else _WithProbes(network, probes)
    names = [o.name for o in io.outputs]
    if probes is not None:
        with torch.no_grad():
            module(*examples)
        names += list(probes)
    with _quiet_exporter():
        program = torch.onnx.export(
            module.eval(),
            examples,
            dynamo=True,
            opset_version=OPSET,
            input_names=[i.name for i in io.inputs],
            output_names=names,
            dynamic_shapes={"tensors": dynamic},
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _name_nodes(model.graph)
    counts = _attach_functions(model, network.context.dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    large = sum(len(t.raw_data) for t in model.graph.initializer) > EXTERNAL_DATA_BYTES
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data")
    onnx.checker.check_model(str(path))
    return ExportedModel(path, io.inputs, tuple(names), counts)


def _example_inputs(inputs: tuple[TensorInfo, ...]) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any] | None, ...]]:
    """Small inputs to trace with, and which of their dimensions are dynamic."""
    sizes, symbols = {"R": 2, "T": 7}, {name: torch.export.Dim(name, min=1) for name in ("R", "T")}
    tensors, dynamic = [], []
    for info in inputs:
        tensors.append(torch.zeros([sizes[d] if isinstance(d, str) else d for d in info.shape], dtype=info.dtype))
        dynamic.append({i: symbols[d] for i, d in enumerate(info.shape) if isinstance(d, str)} or None)
    return tuple(tensors), tuple(dynamic)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter's remarks about its own internals from the user; errors still show."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", message="# The axis name")
            yield
    finally:
        exporter.setLevel(level)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Name each node after the module it came from: ``mtp/0/attn/wq_a/MatMul``."""
    seen: Counter[str] = Counter()
    for node in graph.node:
        scopes = next((p.value for p in node.metadata_props if p.key == _SCOPES), "[]")
        parts = [s.strip("'\" ") for s in scopes.strip("[]").split(",")]
        module = next((p for p in reversed(parts[:-1]) if p), "")
        module = module.removeprefix("network.").removeprefix("model.").replace(".", "/")
        name = f"{module}/{node.op_type}"
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
        del node.metadata_props[:]


def _attach_functions(model: onnx.ModelProto, activation: torch.dtype) -> dict[str, int]:
    """Add a local function for each custom operation in the graph; return the node counts."""
    counts: Counter[str] = Counter()
    attributes: dict[str, Any] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        op = ALL_OPS[node.op_type]
        decoded = decode_attributes(op, node_attributes(node))
        if attributes.setdefault(op.name, decoded) != decoded:
            raise ExportError(
                f"node {node.name}: {op.name} has attributes {decoded}, another node of the model has "
                f"{attributes[op.name]}; one local function can't serve both"
            )
        counts[op.name] += 1
    del model.functions[:]
    model.functions.extend(ALL_OPS[name].onnx_function(a, activation) for name, a in attributes.items())
    if DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, Op.version))
    return dict(counts)
