"""Rewrites an exported model for the ONNX parser of TensorRT 8.

That parser reads opset 17, wants the axes of an operator where it can see them while parsing (attributes or
initializers), and knows neither functions nor the types and operators that came later. The model must have no
functions any more: inlined in the native lowering, dropped in the plugin lowering, whose ``dspark`` nodes pass
unchanged. What is rewritten computes the same; what can't be is listed, all of it, with the reason.

1. ``Constant`` nodes become initializers.
2. ``CastLike`` becomes ``Cast``; attributes that came after opset 17 are dropped where they say the default.
3. Reductions that take their axes as an input since opset 18 get them as an attribute again.
4. Bounds of ``Slice`` beyond 32 bits, which mean "to the end", are cut to 32: the parser makes int32 of all int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from ..plugins.abi import ACTIVATIONS
from ..plugins.op import DOMAIN, decode_attributes
from ..plugins.registry import ALL_OPS
from ..plugins.tensorrt_api import EngineBuildError

OPSET = 17
_IR_VERSION = 8
"""Of the ONNX release that brought opset 17."""

_IO_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32)
_INNER_TYPES = (*_IO_TYPES, TensorProto.INT64, TensorProto.BOOL)
_FLOATS: dict[int, str] = {TensorProto.FLOAT16: "float16", TensorProto.FLOAT: "float32"}
_INT32 = (-(2**31), 2**31 - 1)
_SAME_SINCE_17 = ("Equal", "Identity", "Reshape", "ScatterND", "Shape", "Size", "Split")
"""Operators of which later opsets only take more types, or have options that are refused below."""
_AXES_AS_ATTRIBUTE = (
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)
_READ_WHILE_PARSING = {"Unsqueeze": 1, "Squeeze": 1, "ReduceSum": 1, "Split": 1, "TopK": 1}
"""Operator -> input that must be an initializer."""
_OPERATORS = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip
    Concat ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace Div Dropout Einsum Elu Equal Erf Exp
    Expand EyeLike Flatten Floor Gather GatherElements GatherND Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
    Greater GreaterOrEqual GridSample GRU HardSigmoid Identity InstanceNormalization IsInf IsNaN LayerNormalization
    LeakyRelu Less LessOrEqual Log LogSoftmax LRN LSTM MatMul Max MaxPool Mean MeanVarianceNormalization Min Mod Mul
    Neg NonMaxSuppression NonZero Not OneHot Or Pad Pow PRelu Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    ReverseSequence RNN RoiAlign Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose
    Trilu Unsqueeze Upsample Where Xor
"""
"""What the parser of TensorRT 8.6 imports, without quantisation and control flow."""


def lower_to_opset17(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` in opset 17, for the parser of TensorRT 8; see the module's opening.

    Raises:
        EngineBuildError: with everything that TensorRT 8 has no equivalent for, and why.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    if any(node.op_type == "CastLike" for node in lowered.graph.node):
        lowered = onnx.shape_inference.infer_shapes(lowered)  # the type that is meant may be another node's
    lowering = _Lowering(lowered.graph)
    problems = [f"function {f.domain}.{f.name}: not inlined" for f in lowered.functions]
    problems += lowering.run()
    if problems:
        raise EngineBuildError("this model is not for TensorRT 8:\n" + "\n".join(dict.fromkeys(problems)))
    del lowered.opset_import[:]
    del lowered.graph.value_info[:]
    domains = {node.domain for node in lowered.graph.node} & {DOMAIN}
    versions = [("", OPSET), *((domain, 1) for domain in domains)]
    lowered.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions)
    lowered.ir_version = _IR_VERSION
    return lowered


def float_types(model: onnx.ModelProto) -> dict[str, str]:
    """Name -> "float16" or "float32", of every value of such a type, inferred where the model doesn't tell it."""
    types = value_types(onnx.shape_inference.infer_shapes(model).graph)
    return {name: _FLOATS[kind] for name, kind in types.items() if kind in _FLOATS}


def add_activations(model: onnx.ModelProto) -> None:
    """Give each ``dspark`` node the attribute ``activation``, the type of its T tensors.

    Networks of TensorRT 8 are weakly typed: its builder would choose a plugin's type by what is quicker for that layer.

    Raises:
        EngineBuildError: naming the nodes whose T tensors are of a type that is not known or not TensorRT 8's.
    """
    types, problems = value_types(model.graph), []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        op, said = ALL_OPS[node.op_type], _attributes(node)
        values = decode_attributes(op, {name: said[name] for name in op.field_kinds()})
        inputs = zip(node.input, op.inputs(values), strict=True)
        found = {types.get(name, TensorProto.UNDEFINED) for name, spec in inputs if spec.dtype == "T"}
        if len(found) == 1 and found <= _FLOATS.keys():
            node.attribute.append(helper.make_attribute("activation", ACTIVATIONS[_FLOATS[found.pop()]]))
        else:
            told = ", ".join(sorted(map(_type_name, found)))
            problems.append(
                f"{node.op_type} {node.name}: its activations are {told}, expected all float16 or all float"
            )
    if problems:
        raise EngineBuildError("this model is not for TensorRT 8:\n" + "\n".join(problems))


class _Lowering:
    """One pass over a graph, which it changes."""

    def __init__(self, graph: onnx.GraphProto):
        self._graph = graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._types = value_types(graph)

    def run(self) -> list[str]:
        """Rewrite the graph; what could not be rewritten."""
        problems, nodes = [], []
        io = {f"input {v.name}": v for v in self._graph.input} | {f"output {v.name}": v for v in self._graph.output}
        for name, value in io.items():
            if (kind := value.type.tensor_type.elem_type) not in _IO_TYPES:
                expected = ", ".join(map(_type_name, _IO_TYPES))
                problems.append(f"{name}: TensorRT 8 does not take {_type_name(kind)} there, expected {expected}")
        for node in self._graph.node:
            if node.op_type == "Constant" and not node.domain:
                self._add_initializer(_constant(node))
            else:
                nodes.append(node)
        problems += [
            f"initializer {name}: {_type_name(tensor.data_type)} is not a type of TensorRT 8"
            for name, tensor in self._initializers.items()
            if tensor.data_type not in _INNER_TYPES
        ]
        for node in nodes:
            if why := self._lower(node):
                problems.append(f"{node.op_type} {node.name}: {why}")
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        used = {name for node in nodes for name in node.input} | {value.name for value in self._graph.output}
        kept = [tensor for tensor in self._graph.initializer if tensor.name in used]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept)
        return problems

    def _lower(self, node: NodeProto) -> str:
        """Rewrite one node; why that can't be done, or ""."""
        if node.domain == DOMAIN:
            return ""
        if node.domain:
            return f"TensorRT 8 has no operators of domain {node.domain}"
        if node.op_type == "CastLike" and not self._lower_cast_like(node):
            return f"the type of {node.input[1]} is not known"
        if node.op_type not in _OPERATORS.split():
            return "TensorRT 8 does not have this operator"
        if node.op_type == "Slice":
            self._lower_slice(node)
        if wide := [name for name in node.input if self._is_wide(name)]:
            return f"{', '.join(wide)} holds integers beyond 32 bits"
        if node.op_type == "Cast":
            return self._lower_cast(node)
        if node.op_type in _AXES_AS_ATTRIBUTE:
            return self._lower_reduction(node)
        if (index := _READ_WHILE_PARSING.get(node.op_type)) and not self._is_known(node, index):
            return f"its input {node.input[index]} is computed, and TensorRT 8 must know it while parsing"
        if node.op_type == "Split" and "num_outputs" in _attributes(node):
            return f"num_outputs came after opset {OPSET}; give the sizes of the parts"
        if node.op_type == "ScatterND" and _attributes(node).get("reduction", b"none") != b"none":
            return "TensorRT 8 scatters without a reduction"
        since = onnx.defs.get_schema(node.op_type, 19).since_version
        if since > OPSET and node.op_type not in _SAME_SINCE_17:
            return f"its form of opset {since} is not lowered to opset {OPSET}"
        return ""

    def _is_known(self, node: NodeProto, index: int) -> bool:
        return len(node.input) <= index or not node.input[index] or node.input[index] in self._initializers

    def _lower_cast_like(self, node: NodeProto) -> bool:
        kind = self._types.get(node.input[1])
        if kind is None:
            return False
        node.op_type = "Cast"
        del node.input[1], node.attribute[:]
        node.attribute.append(helper.make_attribute("to", kind))
        return True

    def _lower_cast(self, node: NodeProto) -> str:
        to = _attributes(node)["to"]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", to))
        return "" if to in _INNER_TYPES else f"{_type_name(to)} is not a type of TensorRT 8"

    def _lower_reduction(self, node: NodeProto) -> str:
        if not self._is_known(node, 1):
            return f"its axes {node.input[1]} are computed, and opset {OPSET} has them as an attribute"
        attributes = _attributes(node)
        keeps_all = attributes.pop("noop_with_empty_axes", 0)
        if len(node.input) > 1 and node.input[1]:
            attributes["axes"] = numpy_helper.to_array(self._initializers[node.input[1]]).tolist()
        if keeps_all and not attributes.get("axes"):
            return f"it reduces no axis, which opset {OPSET} can't say"
        del node.input[1:], node.attribute[:]
        if attributes.get("axes") == []:  # which is every axis, said in opset 17 by leaving them out
            del attributes["axes"]
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        return ""

    def _lower_slice(self, node: NodeProto) -> None:
        for index in (1, 2):
            if self._is_wide(name := node.input[index]):
                bounds = numpy_helper.to_array(self._initializers[name])
                # Under a name of its own, for others may use the uncut values.
                node.input[index] = f"{name}_32bit"
                self._add_initializer(numpy_helper.from_array(np.clip(bounds, *_INT32), node.input[index]))

    def _is_wide(self, name: str) -> bool:
        """Whether this is a constant that 32 bits can't hold."""
        tensor = self._initializers.get(name)
        if tensor is None or tensor.data_type != TensorProto.INT64:
            return False
        values = numpy_helper.to_array(tensor)
        return bool((values < _INT32[0]).any() or (values > _INT32[1]).any())

    def _add_initializer(self, tensor: TensorProto) -> None:
        if tensor.name not in self._initializers:
            self._graph.initializer.append(tensor)
            self._initializers[tensor.name] = tensor
            self._types[tensor.name] = tensor.data_type


def value_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Name -> element type, of every value whose type the graph tells."""
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _constant(node: NodeProto) -> TensorProto:
    """The value of a ``Constant`` node under the name of its output."""
    (attribute,) = node.attribute
    if attribute.type == AttributeProto.TENSOR:
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
    else:
        kinds: Mapping[int, type] = {AttributeProto.FLOAT: np.float32, AttributeProto.FLOATS: np.float32}
        kind = kinds.get(attribute.type, np.int64)
        tensor = numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), kind))
    tensor.name = node.output[0]
    return tensor


def _type_name(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower()
