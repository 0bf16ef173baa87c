"""The one module that imports TensorRT, and what the rest of the package needs from it.

Two products serve: enterprise TensorRT (module ``tensorrt``) and TensorRT-RTX (``tensorrt_rtx``). They
share most of their API; :class:`TensorRT` hides the differences that touch us, with :mod:`.rtx` for what only
TensorRT-RTX needs and :mod:`.tensorrt8` for the last major of enterprise TensorRT before IPluginV3 and strongly
typed networks.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from .profiles import Profile
from .rtx import RuntimeCache, unversioned_library_problem
from .tensorrt8 import configure as configure_tensorrt8

logger = logging.getLogger(__name__)

PRODUCTS = ("tensorrt", "tensorrt_rtx")
RTX_COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
"""What a TensorRT-RTX plan is built for unless told otherwise; naming them needs no GPU."""

DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT8": "int8",
}
"""TensorRT's names of types -> torch's."""
SAID_LENGTH = 1000
"""Characters of TensorRT's own messages in an error of one line."""


class TensorRTUnavailableError(RuntimeError):
    """No TensorRT, or not the requested one, can be used on this machine."""


class EngineBuildError(RuntimeError):
    """TensorRT refused a network, or built something else than was meant."""


class EngineLoadError(RuntimeError):
    """A plan can't be deserialised here."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How TensorRT builds: the choice of kernels may change last bits, nothing else."""

    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    """What a plan keeps of its layers for profilers and inspectors."""
    input_timing_cache: Path | None = None
    """Timing cache to start from (enterprise TensorRT)."""
    output_timing_cache: Path | None = None
    """Where to write the timing cache, of an engine directory that of all its networks (enterprise TensorRT)."""
    compute_capabilities: tuple[str, ...] = ()
    """GPUs the engines are for, such as 8.9 (TensorRT-RTX; enterprise TensorRT builds for the GPU it runs on)."""
    builder_optimization_level: Literal[0, 1, 2, 3, 4, 5] | None = None
    """Higher builds longer for faster engines; TensorRT's own choice is 3 (enterprise TensorRT)."""
    onnx_opset: Literal[17, 19] | None = None
    """What the parser is given: 17 is lowered for TensorRT 8, and what that gets when this is left out."""


@dataclass(frozen=True)
class TensorRT:
    """One usable TensorRT: its module, product name (one of :data:`PRODUCTS`) and full version."""

    module: Any
    product: str
    version: str
    log: Any
    """The one logger that builders and runtimes share; see :func:`_make_log`."""

    def __str__(self) -> str:
        return f"{self.product} {self.version}"

    @property
    def is_rtx(self) -> bool:
        return self.product == "tensorrt_rtx"

    @property
    def is_8(self) -> bool:
        """Whether this is TensorRT 8: plugins are IPluginV2, networks weakly typed, models of opset 17."""
        return not self.is_rtx and int(self.version.split(".")[0]) <= 8

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Keep TensorRT's errors of the block for an exception's text; those of a block that succeeds become warnings.

        An error outside of such blocks is logged as an error at once.
        """
        self.log.keeps_errors = True
        try:
            yield
            for message in self.log.errors:
                logger.warning("%s: %s", self.product, message)
        finally:
            self.log.keeps_errors = False
            self.log.errors.clear()

    @contextmanager
    def errors_of(self, prefix: str) -> Iterator[list[str]]:
        """Collect the error messages of the block that start with ``prefix``."""
        found: list[str] = []
        self.log.watched[prefix] = found
        try:
            yield found
        finally:
            del self.log.watched[prefix]

    def error_text(self) -> str:
        """The error messages of the open :meth:`messages` block, one per line."""
        return "\n".join(dict.fromkeys(self.log.errors)) or "(TensorRT gave no reason)"

    def said(self, reasons: Iterable[str] = ()) -> str:
        """``reasons`` and the open :meth:`messages` block's errors on one line; of a flood, the number left out."""
        texts = [" ".join(text.split()).removesuffix(".") for text in dict.fromkeys([*reasons, *self.log.errors])]
        fit = max(1, sum(end <= SAID_LENGTH for end in accumulate(len(text) + len("; ") for text in texts)))
        shown = "; ".join(texts[:fit]) or "nothing"
        shown = shown if len(shown) <= SAID_LENGTH else f"{shown[:SAID_LENGTH]}..."
        return f"it said: {shown}" + (f" (and {len(texts) - fit} more)" if len(texts) > fit else "")

    def runs_on(self, compute_capability: str) -> bool:
        """Whether this product has kernels for such a GPU; only TensorRT-RTX lists them."""
        name = "SM" + compute_capability.replace(".", "")
        return not self.is_rtx or name in self.module.ComputeCapability.__members__

    def compute_capabilities(self, requested: Sequence[str]) -> tuple[str, ...]:
        """The GPUs, as "8.9", that a plan built now will run on.

        Raises:
            EngineBuildError: the product can't build for a requested one.
        """
        if self.is_rtx:
            wanted = tuple(requested) or RTX_COMPUTE_CAPABILITIES
            if unknown := [c for c in wanted if not self.runs_on(c)]:
                raise EngineBuildError(
                    f"{self} can't build for compute capability {', '.join(unknown)}, but for example for "
                    f"{', '.join(RTX_COMPUTE_CAPABILITIES)}; data-centre GPUs such as 9.0 need enterprise TensorRT"
                )
            return wanted
        here = tuple(gpu_compute_capabilities()[:1])
        if requested and tuple(requested) != here:
            raise EngineBuildError(
                f"{self} builds for the GPU it runs on ({', '.join(here) or 'none found'}), "
                f"not for {', '.join(requested)}; build on such a GPU or leave --compute-capabilities out"
            )
        return here

    def option_problem(self, options: EngineOptions) -> str:
        """Why the product does not take ``options``, and what helps; empty if it does."""
        if self.is_rtx and (options.input_timing_cache or options.output_timing_cache):
            return f"{self} times kernels where the plan runs; leave the timing cache options out"
        if self.is_rtx and options.builder_optimization_level is not None:
            return f"{self} has no optimization levels; leave --builder-optimization-level out"
        return ""

    def parse(self, model: bytes, path: Path) -> ParsedNetwork:
        """Parse an ONNX model into a network, strongly typed but in TensorRT 8.

        Args:
            model: the serialised model.
            path: where external weights are looked up, beside this file.

        Raises:
            EngineBuildError: with every message of the parser.
            TensorRTUnavailableError: TensorRT-RTX's parser can't find its library.
        """
        if self.is_rtx and (problem := unversioned_library_problem(self.version)):
            raise TensorRTUnavailableError(problem)
        with self.messages():
            builder = self.module.Builder(self.log)
            flags = self.module.NetworkDefinitionCreationFlag
            flag = flags.STRONGLY_TYPED if hasattr(flags, "STRONGLY_TYPED") else flags.EXPLICIT_BATCH
            network = builder.create_network(1 << int(flag))
            parser = self.module.OnnxParser(network, self.log)
            if not parser.parse(model, str(path)):
                found = [parser.get_error(i) for i in range(parser.num_errors)]
                # "false" is what a check without a text of its own says: the operator is unknown.
                texts = {"false": "TensorRT does not have this operator"}
                lines = [f"{_node_of(e, model)}: {texts.get(e.desc(), e.desc())}" for e in found]
                lines = list(dict.fromkeys(lines)) or [self.error_text()]
                raise EngineBuildError("\n".join([f"{self} can't parse {path}:", *lines]))
        return ParsedNetwork(self, builder, network, parser)

    def deserialize(self, plan: bytes, reasons: Iterable[str] = ()) -> Any:
        """The ICudaEngine of a plan.

        Args:
            reasons: filled by the plugins meanwhile, with what they could not tell TensorRT.

        Raises:
            EngineLoadError: TensorRT returned nothing, with what it logged.
        """
        with self.messages():
            runtime = self.module.Runtime(self.log)
            engine = runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise EngineLoadError(
                    f"{self} can't load this plan of {len(plan)} bytes, expected one that this version built for this "
                    f"GPU; {self.said(reasons)}; build it again on this machine with dspark-build"
                )
        return engine

    def runtime_cache(self, engine: Any, path: Path) -> RuntimeCache | None:
        """The cache of kernels compiled at run time, kept in ``path``; only TensorRT-RTX compiles any."""
        return RuntimeCache(self.module, engine, path) if self.is_rtx else None

    def combined_timing_caches(self, caches: Sequence[bytes]) -> bytes:
        """One timing cache with what is in all of ``caches``, which were written on this machine.

        Raises:
            EngineBuildError: TensorRT does not take them together.
        """
        with self.messages():
            config = self.module.Builder(self.log).create_builder_config()
            combined, *others = (config.create_timing_cache(cache) for cache in caches)
            for other in others:
                if not combined.combine(other, ignore_mismatch=False):
                    raise EngineBuildError(
                        f"{self} can't combine the timing caches of the {len(caches)} networks, expected them to be of "
                        f"one GPU and TensorRT; {self.said()}; leave --output-timing-cache out"
                    )
            return bytes(combined.serialize())

    def context_bytes(self, engine: Any) -> int:
        """Bytes of device memory that an execution context of ``engine`` takes."""
        first = getattr(engine, "device_memory_size", 0)  # until version 10
        return int(getattr(engine, "device_memory_size_v2", first))

    def creators(self) -> list[Any]:
        """All registered plugin creators."""
        registry = self.module.get_plugin_registry()
        return list(registry.plugin_creator_list if self.is_8 else registry.all_creators)


@dataclass(frozen=True)
class ParsedNetwork:
    """A parsed network; keeps builder and parser alive, which own parts of it."""

    api: TensorRT
    builder: Any
    network: Any
    parser: Any

    def plugin_layers(self) -> Counter[str]:
        """Plugin name -> number of plugin layers."""
        counts: Counter[str] = Counter()
        for i in range(self.network.num_layers):
            layer = self.network.get_layer(i)
            if layer.type.name == "PLUGIN_V2":
                layer.__class__ = self.api.module.IPluginV2Layer
                counts[layer.plugin.plugin_type] += 1
            elif layer.type.name == "PLUGIN_V3":
                layer.__class__ = self.api.module.IPluginV3Layer
                # Through the core interface: plugins of a C++ library show their name nowhere else.
                core = layer.plugin.get_capability_interface(self.api.module.PluginCapabilityType.CORE)
                counts[core.plugin_name] += 1
        return counts

    def build(
        self, profiles: Sequence[Profile], options: EngineOptions, types: Mapping[str, str] | None = None
    ) -> bytes:
        """The plan.

        Args:
            types: see :func:`.tensorrt8.configure`; TensorRT 8 only.

        Raises:
            EngineBuildError: TensorRT refused, an option is not this product's, or a dynamic input has no range.
        """
        module, api = self.api.module, self.api
        with api.messages():
            config = self.builder.create_builder_config()
            config.profiling_verbosity = getattr(module.ProfilingVerbosity, options.profiling_verbosity.upper())
            if preview := getattr(getattr(module, "PreviewFeature", None), "ALIASED_PLUGIN_IO_10_03", None):
                config.set_preview_feature(preview, True)
            if flag := getattr(module.BuilderFlag, "REQUIRE_USER_ALLOCATION", None):
                config.set_flag(flag)  # or TensorRT-RTX's engines can't be captured
            if api.is_8:
                configure_tensorrt8(module, self.network, config, types or {})
            self._set_target(config, options)
            inputs = [self.network.get_input(i) for i in range(self.network.num_inputs)]
            dynamic = {tensor.name for tensor in inputs if -1 in tuple(tensor.shape)}
            for profile in profiles or [{}]:
                if set(profile) - {tensor.name for tensor in inputs} or dynamic - set(profile):
                    raise EngineBuildError(
                        f"the profile is for {sorted(profile)}, dynamic inputs are {sorted(dynamic)}; give each of "
                        "those a range and name inputs only, as builder.engine.profiles_for does"
                    )
                entry = self.builder.create_optimization_profile()
                for name, shapes in profile.items():
                    try:
                        entry.set_shape(name, *shapes)
                    except (RuntimeError, TypeError, ValueError) as error:
                        raise EngineBuildError(
                            f"{api} does not take {name} from {shapes[0]} over {shapes[1]} to {shapes[2]} ({error}); "
                            "build for fewer rows or requests"
                        ) from None
                config.add_optimization_profile(entry)
            plan = self.builder.build_serialized_network(self.network, config)
            if plan is None:
                raise EngineBuildError(f"{api} can't build the engine:\n{api.error_text()}")
            if options.output_timing_cache:
                options.output_timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
            return bytes(plan)

    def _set_target(self, config: Any, options: EngineOptions) -> None:
        if problem := self.api.option_problem(options):
            raise EngineBuildError(problem)
        start = options.input_timing_cache
        targets = self.api.compute_capabilities(options.compute_capabilities)
        if not self.api.is_rtx:
            if options.builder_optimization_level is not None:
                config.builder_optimization_level = options.builder_optimization_level
            cache = config.create_timing_cache(start.read_bytes() if start else b"")
            if not config.set_timing_cache(cache, ignore_mismatch=False):
                raise EngineBuildError(f"{start} was written for another GPU or TensorRT; leave it out")
            return
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            member = getattr(self.api.module.ComputeCapability, "SM" + target.replace(".", ""))
            config.set_compute_capability(member, index)


@lru_cache
def probe(product: str) -> TensorRT | str:
    """The product if its module imports, else the reason why not in a few words."""
    try:
        with _lazy_symbols():
            module = importlib.import_module(product)
        version = str(module.__version__)
        return TensorRT(module, product, version, _make_log(module))
    except Exception as error:  # an ImportError, or whatever a half-installed wheel raises
        return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _lazy_symbols() -> Iterator[None]:
    """Import with symbols looked up when called: TensorRT 8 asks for cuBLAS and cuDNN, and may never use them."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags & ~os.RTLD_NOW | os.RTLD_LAZY)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)


def load(product: str | None = None) -> TensorRT:
    """The TensorRT to use: the requested product, else enterprise TensorRT where a GPU is there for it, else RTX.

    Raises:
        TensorRTUnavailableError: saying for each product why it can't be used.
    """
    if product is not None and product not in PRODUCTS:
        raise TensorRTUnavailableError(
            f"TensorRT product {product!r} is unknown, expected one of {', '.join(PRODUCTS)}"
        )
    found = {name: probe(name) for name in ((product,) if product else PRODUCTS)}
    usable = [api for api in found.values() if isinstance(api, TensorRT)]
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        raise TensorRTUnavailableError(
            f"no usable TensorRT ({reasons}); pip install '.[rtx]' in the repository gives one that builds on any "
            "machine, enterprise TensorRT comes from NVIDIA's package index"
        )
    # Enterprise TensorRT can't even make a builder without a GPU.
    return usable[0] if len(usable) == 1 or gpu_compute_capabilities() else usable[-1]


def gpu_compute_capabilities() -> list[str]:
    """Compute capability, as "9.0", of each visible GPU; empty without a usable driver."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return [f"{major}.{minor}" for major, minor in found]


def _node_of(error: Any, model: bytes) -> str:
    """Operator and name of the node that a parser's error is about; TensorRT 8 gives its index."""
    if hasattr(error, "node_operator"):
        return f"{error.node_operator()} {error.node_name()}"
    import onnx

    nodes = onnx.load_model_from_string(model).graph.node
    known = 0 <= error.node() < len(nodes)
    return f"{nodes[error.node()].op_type} {nodes[error.node()].name}" if known else f"node {error.node()}"


def _make_log(module: Any) -> Any:
    """A TensorRT logger that forwards to ``logging``, and keeps the errors of an open ``messages`` block.

    What it says below an error is forwarded at level debug: TensorRT's warnings are about its own steps.
    """

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.keeps_errors = False
            self.errors: list[str] = []
            self.watched: dict[str, list[str]] = {}

        def log(self, severity: Any, message: str) -> None:
            if severity.name in ("ERROR", "INTERNAL_ERROR"):
                for prefix, found in self.watched.items():
                    found += [message] if message.startswith(prefix) else []
                if not self.keeps_errors:
                    logger.error("TensorRT: %s", message)
                    return
                self.errors.append(message)
            logger.debug("%s: %s", severity.name, message)

    return Log()
