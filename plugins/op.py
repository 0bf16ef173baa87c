"""Defines what an operation of this package is.

An operation is declared once, as a subclass of :class:`Op`: its attributes (a frozen dataclass), its
inputs and outputs (names, dtypes and shapes with symbolic dimensions), a torch reference in the
rounding order of the released model, and the same arithmetic as the body of a standard-ONNX function.
From that declaration come the ONNX node that an export writes, the attributes and the model-local
function beside it, the TensorRT plugin fields, shape inference and the dtype check
(:mod:`dspark_trt.plugins.trt_plugin`).

Calling an operation inside ``torch.onnx.export`` writes one node of domain ``dspark``; calling it
anywhere else checks the inputs and computes the reference, or what an open :func:`executor_scope` computes.

Dimensions: a lower-case word (``rows``) is dynamic, a capital letter (``H``) is static and must be
known when an engine is built, an integer is that integer; an attribute's name, possibly divided
(``hidden_size/2``), is what the attribute makes it.
Dtypes: ``T`` is the activation type of the call (bfloat16, float16 or float32), ``int8`` also carries
the bytes of FP8, FP4 and E8M0 tensors.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx
import onnx.parser
import torch
from torch import Tensor

DOMAIN = "dspark"
OPSET = 19
"""Opset of exported models and function bodies; 19 is the first with FP8 casts."""

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FIXED_DTYPES = {"float32": torch.float32, "int32": torch.int32, "int8": torch.int8}
_ONNX_DTYPES = {
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.float32: onnx.TensorProto.FLOAT,
    torch.int32: onnx.TensorProto.INT32,
    torch.int8: onnx.TensorProto.INT8,
}


class OpError(ValueError):
    """An operation was called with tensors or attributes that it does not take."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; the module's opening says what ``dims`` holds."""

    name: str
    dtype: str
    dims: tuple[str | int, ...]
    when: tuple[str, int] | None = None
    """Of a tensor that is there only where this attribute exceeds this number."""
    alias: str | None = None
    """Of an output: the input whose memory it shares."""
    addresses: bool = False
    """Of an input that holds device addresses: nothing may follow them while an engine is being built."""

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.dims))}]"


def is_dynamic(dim: str | int) -> bool:
    """Whether a symbolic dimension may differ between calls of one engine."""
    return isinstance(dim, str) and not dim.isupper()


def parse_dim(dim: str) -> tuple[str, int]:
    """The word or attribute of a dimension and what it is divided by: "hidden_size/2" -> ("hidden_size", 2)."""
    name, _, divisor = dim.partition("/")
    return name, int(divisor or 1)


def _with_sizes(spec: TensorSpec, attributes: Any) -> TensorSpec:
    def size(dim: str | int) -> str | int:
        if isinstance(dim, int):
            return dim
        name, divisor = parse_dim(dim)
        return getattr(attributes, name) // divisor if hasattr(attributes, name) else dim

    return dataclasses.replace(spec, dims=tuple(size(dim) for dim in spec.dims))


def _there(specs: Sequence[TensorSpec], attributes: Any) -> tuple[TensorSpec, ...]:
    present = (s for s in specs if s.when is None or getattr(attributes, s.when[0]) > s.when[1])
    return tuple(_with_sizes(spec, attributes) for spec in present)


class Op(ABC):
    """An operation: declaration, reference and standard-ONNX body. Subclasses hold no state."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    attributes_type: ClassVar[type]
    all_inputs: ClassVar[tuple[TensorSpec, ...]]
    """The inputs, in order; those that some attributes rule out come last."""
    all_outputs: ClassVar[tuple[TensorSpec, ...]]
    """The outputs, in order, likewise; their symbols all occur in the inputs."""

    @abstractmethod
    def reference(self, attributes: Any, *tensors: Any, **_: Any) -> Any:
        """The output, or a tuple of them, computed with plain torch in the released rounding order."""

    @abstractmethod
    def onnx_body(self, attributes: Any, cast: str) -> str:
        """The body in ONNX text syntax; ``cast`` is the Cast call to the activation type."""

    def inputs(self, attributes: Any) -> tuple[TensorSpec, ...]:
        """The inputs that there are with these attributes, dimensions that depend on them as integers."""
        return _there(self.all_inputs, attributes)

    def outputs(self, attributes: Any) -> tuple[TensorSpec, ...]:
        """The outputs that there are with these attributes, likewise."""
        return _there(self.all_outputs, attributes)

    def aliases(self, attributes: Any) -> dict[int, int]:
        """Output index -> index of the input whose memory it shares."""
        names = [spec.name for spec in self.inputs(attributes)]
        return {i: names.index(spec.alias) for i, spec in enumerate(self.outputs(attributes)) if spec.alias}

    def size_problem(self, attributes: Any, sizes: Mapping[str, Any]) -> str:
        """What is wrong with sizes (symbol -> size) that no shared symbol ties together; "" if nothing is."""
        return ""

    def field_kinds(self) -> dict[str, type]:
        """Attribute name -> the type that carries it in ONNX and in a plugin: int (also bool), float or str."""
        kinds = {"int": int, "bool": int, "float": float, "str": str}
        return {f.name: kinds[str(f.type)] for f in dataclasses.fields(self.attributes_type)}

    def __call__(self, *tensors: Tensor, **attributes: Any) -> Any:
        values = self.attributes_type(**attributes)
        bindings = self.bind(values, tensors)
        if torch.onnx.is_in_onnx_export():
            return self._emit(values, tensors, bindings)
        execute = _executor.get()
        return execute(self, values, tensors, bindings) if execute else self.reference(values, *tensors)

    def bind(self, attributes: Any, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Check ``tensors`` against the declaration and return symbol -> size, ``T`` -> dtype.

        Raises:
            OpError: naming the tensor, what it is and what was expected.
        """
        specs = self.inputs(attributes)
        if len(tensors) != len(specs):
            raise OpError(f"{self.name} takes {len(specs)} inputs ({', '.join(map(str, specs))}), got {len(tensors)}")
        bindings: dict[str, Any] = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.dtype == "T":
                wanted = bindings.setdefault("T", tensor.dtype)
                if wanted not in ACTIVATION_DTYPES:
                    raise OpError(f"{self.name}: {spec.name} is {tensor.dtype}, expected one of {ACTIVATION_DTYPES}")
            else:
                wanted = _FIXED_DTYPES[spec.dtype]
            if tensor.dtype != wanted:
                raise OpError(f"{self.name}: {spec.name} is {tensor.dtype}, expected {wanted}")
            if tensor.dim() != len(spec.dims):
                raise OpError(f"{self.name}: {spec.name} has shape {list(tensor.shape)}, expected {spec}")
            for dim, size in zip(spec.dims, tensor.shape, strict=True):
                expected = dim if isinstance(dim, int) else bindings.setdefault(dim, size)
                if size != expected:
                    raise OpError(
                        f"{self.name}: {spec.name} has shape {list(tensor.shape)}, "
                        f"expected {spec} with {dim} = {expected}"
                    )
        if problem := self.size_problem(attributes, bindings):
            raise OpError(f"{self.name}: {problem}")
        return bindings

    def _emit(self, attributes: Any, tensors: Sequence[Tensor], bindings: dict[str, Any]) -> Any:
        outputs = self.outputs(attributes)
        results = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{self.name}",
            tensors,
            attrs=encode_attributes(attributes),
            dtypes=[bindings["T"] if s.dtype == "T" else _FIXED_DTYPES[s.dtype] for s in outputs],
            shapes=[[d if isinstance(d, int) else bindings[d] for d in s.dims] for s in outputs],
            version=self.version,
        )
        return results[0] if len(outputs) == 1 else tuple(results)

    def onnx_function(self, attributes: Any, activation: torch.dtype) -> onnx.FunctionProto:
        """The operation as a model-local function in standard ONNX, for these attributes."""
        inputs = ", ".join(s.name for s in self.inputs(attributes))
        outputs = ", ".join(s.name for s in self.outputs(attributes))
        names = ", ".join(encode_attributes(attributes))
        declared = f" <{names}>" if names else ""
        body = self.onnx_body(attributes, f"Cast<to={_ONNX_DTYPES[activation]}>")
        # TensorRT's own operators, which have no standard equivalent, are in the domain "trt".
        tensorrt = ', "trt" : 1' if "trt." in body else ""
        return onnx.parser.parse_function(
            f'<opset_import: ["" : {OPSET}{tensorrt}], domain: "{DOMAIN}">\n'
            f"{self.name}{declared} ({inputs}) => ({outputs}) {{\n{body}\n}}"
        )


OpExecutor = Callable[[Op, Any, Sequence[Tensor], dict[str, Any]], Any]
"""Takes an operation, its attributes, its checked inputs and their bindings; returns the outputs."""

_executor: ContextVar[OpExecutor | None] = ContextVar("dspark_executor", default=None)


@contextmanager
def executor_scope(executor: OpExecutor) -> Iterator[None]:
    """Let ``executor`` compute every operation inside the ``with`` block instead of its reference."""
    token = _executor.set(executor)
    try:
        yield
    finally:
        _executor.reset(token)


def encode_attributes(attributes: Any) -> dict[str, Any]:
    """Attributes as an ONNX node carries them: bool as 0 / 1, integers checked to fit signed 32 bits.

    TensorRT truncates larger integers without a message, so they are refused here.

    Raises:
        OpError: an integer does not fit.
    """
    encoded: dict[str, Any] = {}
    for field in dataclasses.fields(attributes):
        value = getattr(attributes, field.name)
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise OpError(
                f"attribute {field.name} = {value} does not fit 32 bits; a TensorRT plugin field can't carry it"
            )
        encoded[field.name] = value
    return encoded


def node_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Name -> value of an ONNX node's attributes, texts as str."""
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def decode_attributes(op: Op, values: dict[str, Any]) -> Any:
    """Rebuild an op's attributes from name -> value; every field must be there with its own type.

    Raises:
        OpError: listing the missing, the unknown and the wrongly typed fields.
    """
    fields, kinds = {f.name: f.type for f in dataclasses.fields(op.attributes_type)}, op.field_kinds()
    missing, unknown = sorted(set(fields) - set(values)), sorted(set(values) - set(fields))
    decoded, wrong = {}, []
    for name in fields.keys() & values.keys():
        value, kind = values[name], fields[name]
        if type(value) is not kinds[name] and not (kinds[name] is int and type(value) is bool):
            wrong.append(f"{name} = {value!r} ({type(value).__name__}, expected {kind})")
        decoded[name] = bool(value) if kind == "bool" else value
    if missing or unknown or wrong:
        raise OpError(
            f"{op.name}: attributes missing {missing}, unknown {unknown}, of wrong type {wrong}; "
            "the model was exported by another version of this package, export it again"
        )
    return op.attributes_type(**decoded)
