"""Random inputs for every operation, with the attributes of both variants, and a runner for ONNX bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from dspark_trt.plugins.op import DOMAIN, OPSET, Op, encode_attributes
from dspark_trt.plugins.registry import ALL_OPS
from torch import Tensor

CACHES: dict[str, dict[str, Any]] = {
    # V4 rounds the channels before RoPE, in groups of 64; V4.1 all of them, in groups of 32.
    "v4": {"rope_dims": 64, "rope_theta": 1e4, "quant_width": 64, "quant_group": 64, "head_dim": 128},
    "v4.1": {"rope_dims": 16, "rope_theta": 1e4, "quant_width": 64, "quant_group": 32, "head_dim": 64},
    "dequantized": {"rope_dims": 16, "rope_theta": 1e4, "quant_width": 0, "quant_group": 32, "head_dim": 64},
}
UNQUANTIZED = {"quant_width": 0, "swizzled_tiles": 0}
"""Attributes of an MhcAllReduce without the MXFP8 outputs."""
SLOTS, WINDOW, HEADS, BLOCK, HIDDEN, VOCAB, RANK = 3, 128, 4, 5, 128, 97, 16
ONNX_TYPES = {torch.float32: 1, torch.float16: 10, torch.int32: 6, torch.int8: 3}


@dataclass(frozen=True)
class Example:
    """One call of an operation."""

    label: str
    op: Op
    attributes: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def values(self) -> Any:
        return self.op.attributes_type(**self.attributes)

    @property
    def dynamic(self) -> list[bool]:
        """Which tensors have a row for each request or token."""
        return [spec.dims[0] in ("rows", "requests") for spec in self.op.inputs(self.values)]

    def run(self) -> tuple[Tensor, ...]:
        out = self.op(*self.tensors, **self.attributes)
        return out if isinstance(out, tuple) else (out,)

    def rows(self, index: Any) -> Example:
        """The same call with a part of its rows."""
        tensors = [t[index] if dynamic else t for t, dynamic in zip(self.tensors, self.dynamic, strict=True)]
        return Example(self.label, self.op, self.attributes, tuple(tensors))

    def replaced(self, position: int, tensor: Tensor) -> Example:
        tensors = list(self.tensors)
        tensors[position] = tensor
        return Example(self.label, self.op, self.attributes, tuple(tensors))


def run_onnx(example: Example, activation: torch.dtype) -> list[Tensor]:
    """Outputs of a model of one node and its local function, in ONNX Runtime on the CPU."""
    import onnxruntime  # here, so that tests on a GPU machine do without it

    op, values = example.op, example.values
    inputs, results = op.inputs(values), example.run()
    outputs = op.outputs(values)
    node = onnx.helper.make_node(
        op.name,
        [s.name for s in inputs],
        [s.name for s in outputs],
        domain=DOMAIN,
        **encode_attributes(values),
    )
    graph = onnx.helper.make_graph(
        [node],
        "one_op",
        [
            onnx.helper.make_tensor_value_info(s.name, ONNX_TYPES[t.dtype], list(t.shape))
            for s, t in zip(inputs, example.tensors, strict=True)
        ],
        [
            onnx.helper.make_tensor_value_info(s.name, ONNX_TYPES[r.dtype], list(r.shape))
            for s, r in zip(outputs, results, strict=True)
        ],
    )
    model = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, op.version)],
        functions=[op.onnx_function(values, activation)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {s.name: t.numpy() for s, t in zip(inputs, example.tensors, strict=True)}
    return [torch.from_numpy(np.array(out)) for out in session.run(None, feeds)]


class _Random:
    def __init__(self, activation: torch.dtype, seed: int):
        self.activation, self.generator = activation, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return std * torch.randn(shape, generator=self.generator)

    def act(self, *shape: int, std: float = 1.0) -> Tensor:
        return self.normal(*shape, std=std).to(self.activation)

    def outlier(self, *shape: int) -> Tensor:
        """Channel 3 is 4096 times as large, so that the channels that share its scale lose precision and show
        the group; the weights have no use for it."""
        x = self.normal(*shape)
        x[..., 3] *= 4096
        return x.to(self.activation)

    def uniform(self, *shape: int, high: float = 1.0) -> Tensor:
        return high * torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def fp8(self, *shape: int) -> Tensor:
        return self.normal(*shape, std=16.0).to(torch.float8_e4m3fn).view(torch.int8)

    def fp4(self, *shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=self.generator).to(torch.int8)

    def scales(self, *shape: int, around: int) -> Tensor:
        return torch.randint(around - 1, around + 2, shape, generator=self.generator).to(torch.int8)


def examples(activation: torch.dtype, rows: int = 7, seed: int = 0) -> list[Example]:
    """A call of every operation with ``rows`` rows or requests, of both variants where they differ."""
    make, out = _Random(activation, seed), []

    def add(label: str, name: str, attributes: dict[str, Any], *tensors: Tensor) -> None:
        out.append(Example(label, ALL_OPS[name], attributes, tensors))

    for variant, eps in (("v4", 1e-6), ("v4.1", 1e-20)):
        add(
            f"MhcCoefficients {variant}",
            "MhcCoefficients",
            {"rms_eps": eps, "hc_eps": 1e-6, "sinkhorn_iters": 20},
            make.act(rows, 4, HIDDEN, std=3.0),
            make.normal(24, 4 * HIDDEN, std=(4 * HIDDEN) ** -0.5),
            make.normal(3),
            make.normal(24),
        )
    add(
        "MhcCoefficients equal streams",
        "MhcCoefficients",
        {"rms_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20},
        make.act(rows, 1, HIDDEN, std=3.0).expand(-1, 4, -1).contiguous(),
        make.normal(24, HIDDEN, std=HIDDEN**-0.5),
        make.normal(3),
        make.normal(24),
    )
    mixing = (make.act(rows, HIDDEN), make.act(rows, 4, HIDDEN), make.uniform(rows, 4, high=2.0))
    comb = torch.softmax(make.normal(rows, 4, 4, std=2.0), 1)
    norm = (make.uniform(rows, 4), (1 + make.normal(HIDDEN, std=0.1)).to(activation))
    add("HcCollapse", "HcCollapse", {}, mixing[1], norm[0])
    for variant, eps in (("v4", 1e-6), ("v4.1", 1e-20)):
        boundary = {"tp_size": 1, "norm_eps": eps, **UNQUANTIZED}
        add(f"MhcAllReduce {variant}", "MhcAllReduce", boundary, *mixing, comb, *norm)
    quantized = {"tp_size": 1, "norm_eps": 1e-20, "quant_width": HIDDEN, "swizzled_tiles": 0}
    add("MhcAllReduce mxfp8", "MhcAllReduce", quantized, *mixing, comb, *norm)
    add("MhcAllReduceResidualOnly", "MhcAllReduceResidualOnly", {"tp_size": 1}, *mixing, comb)

    for variant, cache in CACHES.items():
        dim = cache["head_dim"]
        ring, sink = make.act(SLOTS, WINDOW, dim), 2 + make.uniform(HEADS)
        slots = make.integers(0, SLOTS, rows)
        positions = make.integers(0, 300, rows)
        add(
            f"DraftAttention {variant}",
            "DraftAttention",
            cache,
            make.act(rows, BLOCK, HEADS, dim),
            make.act(rows, BLOCK, dim),
            positions,
            slots,
            ring,
            sink,
        )
        add(
            f"TargetAttention {variant}",
            "TargetAttention",
            {**cache, "window": WINDOW - 7},
            make.act(rows, HEADS, dim),
            positions,
            slots,
            ring,
            sink,
        )
        add(
            f"ContextKvInsert {variant}",
            "ContextKvInsert",
            cache,
            make.outlier(rows, dim),
            # Consecutive positions of a slot, as every caller has them, across the ring's end.
            126 + torch.stack([(slots[:i] == slots[i]).sum() for i in range(rows)]).int() if rows else slots,
            slots,
            ring,
        )

    # 128: a last block that is not full, as hidden sizes of the tiny models have it.
    for block, columns in ((32, 96), (128, 80)):
        weight = make.fp8(columns, 2 * HIDDEN)
        weight[:, 3] = 0
        add(
            f"QuantizedLinear {block}",
            "QuantizedLinear",
            {"block": block},
            make.outlier(rows, 2 * HIDDEN),
            weight,
            make.scales(-(-columns // block), 2 * HIDDEN // block, around=120),
        )
    experts, inner, top_k = 6, 128, 3
    for group, limit in ((32, 10.0), (128, 1.0)):
        packed = []
        for n, k in ((inner, HIDDEN), (HIDDEN, inner), (inner, HIDDEN)):
            packed += [make.fp4(experts, n, k // 2), make.scales(experts, n, k // 32, around=123)]
            packed[-2][:, :, 1] = 0
        order = make.uniform(rows, experts).argsort(-1)[:, :top_k].int()
        add(
            f"RoutedExperts {group}",
            "RoutedExperts",
            {"group": group, "hidden_size": HIDDEN, "intermediate_size": inner, "swiglu_limit": limit},
            make.outlier(rows, HIDDEN),
            order,
            make.uniform(rows, top_k),
            *packed,
        )
    for kind in ("greedy", "sampled", "sampled in float64"):
        sampling = kind != "greedy"
        keys = (
            (
                make.integers(0, 1000, rows),
                torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(rows // 4 + 1)[:rows],
                make.integers(-(2**31), 2**31 - 1, rows, 2),
            )
            if sampling
            else ()
        )
        add(
            f"MarkovSampling {kind}",
            "MarkovSampling",
            {"block_size": BLOCK, "sampling": sampling, "float64_noise": "float64" in kind, "write_logits": True},
            make.normal(rows, BLOCK, VOCAB, std=2.0),
            make.integers(0, VOCAB, rows),
            make.act(VOCAB, RANK),
            make.act(VOCAB, RANK, std=RANK**-0.5),
            *keys,
        )
        add(
            f"MarkovSamplingSharded {kind}",
            "MarkovSamplingSharded",
            {"block_size": BLOCK, "sampling": sampling, "float64_noise": "float64" in kind, "tp_size": 1, "rank": 0},
            *out[-1].tensors,
        )
    return out


def example(label: str, activation: torch.dtype, rows: int = 7, seed: int = 0) -> Example:
    return next(e for e in examples(activation, rows, seed) if e.label == label)


LABELS = [e.label for e in examples(torch.float32, 1)]
