"""One TensorRT plugin class for every operation, driven by the operation's declaration.

A plan holds, for each plugin layer, name, version, namespace and the fields of
``get_fields_to_serialize``: the attributes plus an ABI number. Everything else (shapes, dtypes, checks,
aliases) follows from the declaration in :mod:`.op`. ``cpp_plugins`` has the same plugin in C++ for hosts
without Python.

TensorRT calls these methods from C++ and loses their exceptions: some end a build without a reason, some
(``get_fields_to_serialize``, ``get_workspace_size``, ``get_aliased_input``) are printed and then ignored, so that the
build returns a broken plan. Every method therefore records what went wrong in :class:`PluginFailures`, and the build
checks that, even after a success.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .kernels import has_kernel, launch, workspace_bytes
from .library import PLUGIN_ABI, TRT_LIBRARY_NAME, describe_library, find_library, load_trt_plugins
from .op import DOMAIN, Op, OpError, decode_attributes, encode_attributes, is_dynamic
from .tensorrt_api import DTYPE_NAMES, EngineBuildError, EngineLoadError, TensorRT

logger = logging.getLogger(__name__)

ABI_FIELD = "plugin_abi"
_ACTIVATIONS = ("float32", "float16", "bfloat16")
_TRT_NAMES = {ours: theirs for theirs, ours in DTYPE_NAMES.items()}


@dataclass
class PluginFailures:
    """Errors of plugin methods, which TensorRT does not pass on."""

    errors: list[str] = field(default_factory=list)
    """Faults; a build with one is void even if TensorRT returned a plan."""
    refusals: dict[str, None] = field(default_factory=dict)
    """Tensors that an operation does not take, in the order seen; matter only if the build fails."""

    def text(self) -> str:
        return "\n".join(dict.fromkeys([*self.errors, *self.refusals]))


@dataclass(frozen=True)
class TensorDesc:
    """One tensor as TensorRT describes it: dtype by torch's name; -1 is a dimension not known yet."""

    dtype: str
    dims: tuple[int, ...]
    linear: bool = True

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.dims)}{'' if self.linear else ' in a format that is not linear'}"


def check_tensors(op: Op, attributes: Any, tensors: Sequence[TensorDesc], num_inputs: int) -> list[str]:
    """Every way in which ``tensors`` (inputs, then outputs; a prefix will do) differ from the declaration."""
    inputs, outputs = op.inputs(attributes), op.outputs(attributes)
    if num_inputs != len(inputs) or len(tensors) > len(inputs) + len(outputs):
        return [
            f"{num_inputs} inputs and {len(tensors) - num_inputs} outputs, expected {len(inputs)} and {len(outputs)}"
        ]
    problems: list[str] = []
    bindings: dict[str, Any] = {}
    for spec, tensor in zip(inputs + outputs, tensors, strict=False):
        wrong = not tensor.linear or len(tensor.dims) != len(spec.dims)
        if spec.dtype == "T":
            wrong |= tensor.dtype not in _ACTIVATIONS or bindings.setdefault("T", tensor.dtype) != tensor.dtype
        else:
            wrong |= tensor.dtype != spec.dtype
        for dim, size in zip(spec.dims, tensor.dims, strict=False):
            if isinstance(dim, int):
                wrong |= size != dim
            elif size == -1:
                wrong |= not is_dynamic(dim)
            else:
                wrong |= bindings.setdefault(dim, size) != size
        if wrong:
            known = f" with {', '.join(f'{k} = {v}' for k, v in bindings.items())}" if bindings else ""
            problems.append(f"{spec.name} is {tensor}, expected {spec}{known}")
    return problems


def require_creators(api: TensorRT, wanted: Mapping[str, int], library: Path | None = None) -> None:
    """Raise :class:`EngineLoadError` unless every operation of name -> version has a registered creator.

    TensorRT itself would name one of them, and none of the reasons.

    Args:
        library: what was loaded to register them, if anything was.
    """
    there = {(c.name, c.plugin_version) for c in api.creators() if c.plugin_namespace == DOMAIN}
    if absent := [name for name, version in wanted.items() if (name, str(version)) not in there]:
        triples = ", ".join(f"{name} version {wanted[name]} namespace {DOMAIN}" for name in absent)
        found = ", ".join(f"{name} version {version}" for name, version in sorted(there))
        open_block = "open registered_creators() around the load, or load a library of that version"
        raise EngineLoadError(
            f"no plugin creator for {triples}; registered in namespace {DOMAIN}: {found or 'none'}; plugin library: "
            f"{library or describe_library(TRT_LIBRARY_NAME)}; "
            f"{'build that library again from cpp_plugins' if library else open_block}"
        )


@contextmanager
def registered_creators(api: TensorRT, ops: Iterable[Op]) -> Iterator[PluginFailures]:
    """Register one creator per operation for the time of the block, and collect what its plugins report.

    For TensorRT 8, which can't have plugins in Python, the library of plugins in C++ is loaded instead, and stays.

    Raises:
        EngineBuildError: a creator of that name is there already.
        KernelUnavailableError: TensorRT 8, and no library of plugins for it.
        EngineLoadError: TensorRT 8, and that library lacks an operation.
    """
    if api.is_8:
        library = load_trt_plugins(8)
        require_creators(api, {op.name: op.version for op in ops}, library)
        # The library's plugins can only log; of some of their faults TensorRT 8 never hears.
        with api.errors_of(f"{DOMAIN}.") as errors:
            yield PluginFailures(errors)
        return
    registry, failures = api.module.get_plugin_registry(), PluginFailures()
    _, creator_class = _plugin_classes(api)
    creators = []
    try:
        for op in ops:
            creator = creator_class(op, failures)
            if not registry.register_creator(creator, DOMAIN):
                raise EngineBuildError(
                    f"{op.name} version {op.version} is already registered in namespace {DOMAIN}, by a library that "
                    "was loaded or by another registered_creators() block; leave out that or this block; plugin "
                    f"library: {describe_library(TRT_LIBRARY_NAME)}"
                )
            creators.append(creator)
        yield failures
    finally:
        for creator in creators:
            registry.deregister_creator(creator)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note an exception with plugin and layer before it is lost in C++."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.note(f"{method.__name__}: {error}")
            raise

    return wrapper


class _PluginMethods:
    """What TensorRT calls of the plugin of one layer; :func:`_plugin_classes` adds TensorRT's interfaces."""

    trt: Any
    """TensorRT's module."""

    def __init__(self, op: Op, attributes: Any, layer: str, failures: PluginFailures) -> None:
        self.op, self.attributes, self.layer, self.failures = op, attributes, layer, failures
        self.specs = op.inputs(attributes)
        self.plugin_name = op.name
        self.plugin_version = str(op.version)
        self.plugin_namespace = DOMAIN
        self.num_outputs = len(op.outputs(attributes))
        # Timings are cached under this; a plugin has one kernel and no tactics, so nothing is.
        self.timing_cache_id = ""

    def note(self, problem: str) -> None:
        self.failures.errors.append(f"{DOMAIN}.{self.op.name}, layer {self.layer}: {problem}")

    def clone(self) -> Any:
        # May not fail: an exception here is a null pointer in C++.
        return type(self)(self.op, self.attributes, self.layer, self.failures)

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    @_noting
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        names = [DTYPE_NAMES.get(t.name, t.name.lower()) for t in input_types]
        if len(names) != len(self.specs):
            raise OpError(f"{len(names)} inputs, expected {', '.join(map(str, self.specs))}")
        activation = next((n for n, s in zip(names, self.specs, strict=True) if s.dtype == "T"), "float32")
        wanted = [activation if s.dtype == "T" else s.dtype for s in self.specs]
        if activation not in _ACTIVATIONS or names != wanted:
            raise OpError(f"inputs are {names}, expected {', '.join(map(str, self.specs))}, T one of {_ACTIVATIONS}")
        outputs = self.op.outputs(self.attributes)
        return [getattr(self.trt.DataType, _TRT_NAMES[activation if s.dtype == "T" else s.dtype]) for s in outputs]

    @_noting
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        bindings: dict[str, Any] = {}
        for spec, dims in zip(self.specs, inputs, strict=True):
            if len(dims) != len(spec.dims):
                raise OpError(f"{spec.name} has {len(dims)} dimensions, expected {spec}")
            bindings |= {str(d): dims[i] for i, d in enumerate(spec.dims)}
        shapes = []
        for spec in self.op.outputs(self.attributes):
            shape = self.trt.DimsExprs(len(spec.dims))
            for i, dim in enumerate(spec.dims):
                shape[i] = builder.constant(dim) if isinstance(dim, int) else bindings[dim]
            shapes.append(shape)
        return shapes

    @_noting
    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        described = [self._describe(t.desc) for t in tensors[: position + 1]]
        problems = check_tensors(self.op, self.attributes, described, num_inputs)
        if problems and described[-1].linear:
            self.failures.refusals[f"{DOMAIN}.{self.op.name}, layer {self.layer}: {problems[-1]}"] = None
        return not problems

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._check([t.desc for t in (*inputs, *outputs)], len(inputs))

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._check([*inputs, *outputs], len(inputs))

    @_noting
    def _check(self, descriptions: Sequence[Any], num_inputs: int) -> None:
        if problems := check_tensors(self.op, self.attributes, [self._describe(d) for d in descriptions], num_inputs):
            raise OpError("; ".join(problems))
        named = zip(self.specs, descriptions[:num_inputs], strict=True)
        sizes = {str(d): size for spec, desc in named for d, size in zip(spec.dims, desc.dims, strict=True)}
        if problem := self.op.size_problem(self.attributes, sizes):
            raise OpError(problem)

    @_noting
    def get_aliased_input(self, output: int) -> int:
        return self.op.aliases(self.attributes).get(output, -1)

    @_noting
    def get_fields_to_serialize(self) -> Any:
        # TensorRT reads the arrays after this returns, so the plugin keeps them.
        self._fields = []
        for name, value in {**encode_attributes(self.attributes), ABI_FIELD: PLUGIN_ABI}.items():
            data = (
                np.frombuffer(value.encode() + b"\0", np.int8)
                if isinstance(value, str)
                else np.array([value], np.float32 if isinstance(value, float) else np.int32)
            )
            self._fields.append(self.trt.PluginField(name, data, _field_type(self.trt, type(value))))
        return self.trt.PluginFieldCollection(self._fields)

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        pass

    @_noting
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        # Without the library a plan can be built but not run: its directory's header says so.
        if find_library() is None or not has_kernel(self.op):
            return 0
        activation, sizes = self._sizes([t.desc for t in inputs], largest=[t.max for t in inputs])
        return workspace_bytes(self.op, self.attributes, activation, sizes)

    def _sizes(self, descriptions: Sequence[Any], largest: Sequence[Any] | None = None) -> tuple[str, dict[str, int]]:
        """The activation type, and symbol -> size of tensors in declaration order."""
        specs = (*self.specs, *self.op.outputs(self.attributes))[: len(descriptions)]
        dims = largest or [d.dims for d in descriptions]
        sizes: dict[str, int] = {}
        activation = "float32"
        for spec, desc, own in zip(specs, descriptions, dims, strict=True):
            sizes |= {str(d): size for d, size in zip(spec.dims, own, strict=True)}
            activation = self._describe(desc).dtype if spec.dtype == "T" else activation
        return activation, sizes

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    @_noting
    def enqueue(
        self,
        input_descs: Sequence[Any],
        output_descs: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        activation, sizes = self._sizes([*input_descs, *output_descs])
        specs = (*self.specs, *self.op.outputs(self.attributes))
        pointers = {s.name: p for s, p in zip(specs, (*inputs, *outputs), strict=True)}
        launch(self.op, self.attributes, activation, sizes, pointers, workspace, stream)

    def _describe(self, desc: Any) -> TensorDesc:
        dtype = DTYPE_NAMES.get(desc.type.name, desc.type.name.lower())
        return TensorDesc(dtype, tuple(desc.dims), desc.format == self.trt.TensorFormat.LINEAR)


class _CreatorMethods:
    """What TensorRT calls of the creator of one operation's plugins, likewise."""

    trt: Any
    plugin_class: Callable[..., Any]

    def __init__(self, op: Op, failures: PluginFailures) -> None:
        self.op, self.failures = op, failures
        self.name = op.name
        self.plugin_version = str(op.version)
        self.plugin_namespace = DOMAIN
        kinds = op.field_kinds().items()
        self.field_names = self.trt.PluginFieldCollection(
            [self.trt.PluginField(name, np.array([]), _field_type(self.trt, kind)) for name, kind in kinds]
        )

    def create_plugin(self, layer: str, fields: Iterable[Any], phase: Any) -> Any:
        try:
            values = {f.name: _field_value(f) for f in fields}
            if phase == self.trt.TensorRTPhase.RUNTIME:
                found = values.pop(ABI_FIELD, None)
                if found != PLUGIN_ABI:
                    raise OpError(
                        f"the plan was built with plugin ABI {found}, this package has {PLUGIN_ABI}; build it again"
                    )
            return self.plugin_class(self.op, decode_attributes(self.op, values), layer, self.failures)
        except Exception as error:
            problem = f"{DOMAIN}.{self.op.name}, layer {layer}: {error}"
            self.failures.errors.append(problem)
            logger.error("%s", problem)
            return None


@lru_cache
def _plugin_classes(api: TensorRT) -> tuple[type, type]:
    """The plugin and the creator class; made on demand because they derive from TensorRT's."""
    module: Any = api.module
    build_base = getattr(module, "IPluginV3OneBuildV2", module.IPluginV3OneBuild)
    bases = (module.IPluginV3, module.IPluginV3OneCore, build_base, module.IPluginV3OneRuntime)

    class OpPlugin(_PluginMethods, *bases):  # type: ignore[misc]
        trt = module

        def __init__(self, *arguments: Any) -> None:
            for base in bases:
                base.__init__(self)
            super().__init__(*arguments)

    class OpCreator(_CreatorMethods, module.IPluginCreatorV3One):
        trt, plugin_class = module, OpPlugin

        def __init__(self, *arguments: Any) -> None:
            module.IPluginCreatorV3One.__init__(self)
            super().__init__(*arguments)

    return OpPlugin, OpCreator


def _field_type(trt: Any, kind: type) -> Any:
    """TensorRT's type of a plugin field that holds a ``kind``."""
    names = {int: "INT32", float: "FLOAT32", str: "CHAR"}
    return getattr(trt.PluginFieldType, names[kind])


def _field_value(field: Any) -> int | float | str | list[Any]:
    """A plugin field as int, float or str; a list when it holds another number of values."""
    kind = field.type.name
    if kind == "CHAR":
        return bytes(field.data).rstrip(b"\0").decode()
    values = np.asarray(field.data).tolist()
    return values[0] if len(values) == 1 else values
