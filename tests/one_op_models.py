"""ONNX models of one operation, for tests of plugins and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.network import TensorInfo
from dspark_trt.builder.onnx_export import ExportedModel
from dspark_trt.plugins import op as ops
from dspark_trt.plugins.registry import ALL_OPS
from dspark_trt.plugins.tensorrt_api import EngineOptions

BUILD = BuildConfig(max_batch_size=2, options=EngineOptions(compute_capabilities=("8.9",)))
"""Of engine directories whose networks are such models."""

SIZES = {"H": 128, "K": 512, "P": 4, "B": 5, "N": 4, "S": 3, "W": 16, "V": 96, "R": 8, "E": 6, "M": 1, "J": 16, "L": 96}
"""Sizes of the static dimensions; K of MhcCoefficients is 4 H."""

CACHE = {"rope_dims": 8, "rope_theta": 10000.0, "quant_width": 0, "quant_group": 32}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "MhcCoefficients": {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20},
    "MhcAllReduce": {"tp_size": 1, "norm_eps": 1e-6, "quant_width": 0, "swizzled_tiles": 0},
    "MhcAllReduceResidualOnly": {"tp_size": 1},
    "HcCollapse": {},
    "DraftAttention": {**CACHE, "head_dim": 32},
    "TargetAttention": {**CACHE, "head_dim": 32, "window": 8},
    "ContextKvInsert": {**CACHE, "head_dim": 32},
    "QuantizedLinear": {"block": 32},
    "RoutedExperts": {"group": 32, "hidden_size": 128, "intermediate_size": 64, "swiglu_limit": 10.0},
    "MarkovSampling": {"block_size": 5, "sampling": False, "float64_noise": False, "write_logits": True},
    "MarkovSamplingSharded": {"block_size": 5, "sampling": False, "float64_noise": False, "tp_size": 1, "rank": 0},
}
_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
    "int8": onnx.TensorProto.INT8,
}


def one_op_model(name: str, activation: str = "float32", *, function: bool = True, **changed: Any) -> onnx.ModelProto:
    """A model whose single node is the operation, with its function beside it.

    Args:
        changed: attributes that differ from :data:`ATTRIBUTES`.
    """
    op = ALL_OPS[name]
    values = op.attributes_type(**{**ATTRIBUTES[name], **changed})

    def info(spec: ops.TensorSpec) -> onnx.ValueInfoProto:
        dims = [SIZES.get(d, d) if isinstance(d, str) else d for d in spec.dims]
        return onnx.helper.make_tensor_value_info(
            spec.name, _TYPES[activation if spec.dtype == "T" else spec.dtype], dims
        )

    inputs, outputs = op.inputs(values), op.outputs(values)
    node = onnx.helper.make_node(
        name,
        [s.name for s in inputs],
        [s.name for s in outputs],
        name=f"the_{name}",
        domain=ops.DOMAIN,
        **ops.encode_attributes(values),
    )
    graph = onnx.helper.make_graph([node], "one_op", [info(s) for s in inputs], [info(s) for s in outputs])
    imports = [onnx.helper.make_opsetid("", ops.OPSET), onnx.helper.make_opsetid(ops.DOMAIN, 1)]
    functions = [op.onnx_function(values, getattr(torch, activation))] if function else []
    return onnx.helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


def profile_of(model: onnx.ModelProto, rows: tuple[int, int, int] = (1, 4, 8)) -> dict[str, Any]:
    """A profile that gives every dynamic dimension of the model the same range."""
    profile = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        profile[value.name] = tuple(tuple(n if d.dim_param else d.dim_value for d in dims) for n in rows)
    return profile


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def stand_in_export(network: tuple[str, Path, int, BuildConfig], path: Path) -> ExportedModel:
    """A model of one operation in place of a network; the file differs by rank."""
    _, _, rank, build = network
    model = one_op_model("HcCollapse", build.dtype)
    model.graph.node[0].name = f"collapse_of_rank_{rank}"
    onnx.save(model, path)
    dtype = getattr(torch, build.dtype)
    inputs = (TensorInfo("streams", dtype, ("T", 4, 128)), TensorInfo("pre", torch.float32, ("T", 4)))
    return ExportedModel(path, inputs, ("hidden",), {"HcCollapse": 1})
