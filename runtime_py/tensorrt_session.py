"""Executes a TensorRT engine behind the interface of :mod:`.session`.

The core, :meth:`TensorRTSession.enqueue`, takes shapes, device addresses and a stream handle, and needs no torch.
It keeps to calls that TensorRT 8.6, 10, 11 and TensorRT-RTX share.

An execution context holds the shapes and addresses of its last call, and owns the memory for intermediate tensors.
There is one per profile, which every call of that profile uses. A captured graph goes on using that memory, and what
the context computed from the shapes. So once a call is captured, its context serves only calls of the same shapes, and
other calls get a new context. That makes one context for each captured request count, with
:meth:`~dspark_trt.plugins.tensorrt_api.TensorRT.context_bytes` bytes of device memory each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plugins.profiles import Profile, Shape, check_shapes
from ..plugins.tensorrt_api import DTYPE_NAMES, EngineLoadError, TensorRT, gpu_compute_capabilities

if TYPE_CHECKING:
    from torch import Tensor

    from ..builder.engine_dir import EngineDir, Kind
    from ..builder.network import NetworkIO, TensorInfo

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""What TensorRT expects of every address, in bytes."""


class BindingError(ValueError):
    """A call's addresses can't be bound to an engine's inputs and outputs, or the call can't be captured."""


class EngineRunError(RuntimeError):
    """TensorRT refused a call."""


@dataclass
class _Context:
    """An execution context and what it was told last."""

    context: Any
    profile: int
    shapes: dict[str, Shape] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    warm: bool = False
    """Whether a call of these shapes has run."""
    captured: bool = False
    """Whether a graph goes on using it."""


class TensorRTSession:
    """Runs one engine of one rank, asynchronously.

    Args:
        engine: an ``ICudaEngine`` of ``api``.
        io: the network's names, dtypes (torch's, or their names) and aliases; the engine must agree.
        name: what messages call it.
        runtime_cache: file for the kernels that TensorRT-RTX compiles at run time.
        own: inputs that are the session's, such as the mailbox; callers leave them out.
        faults: collects the errors of the engine's plugins that TensorRT does not pass on.

    Raises:
        EngineLoadError: the engine's tensors are not those of ``io``, or there is no memory for its contexts.
    """

    def __init__(
        self,
        api: TensorRT,
        engine: Any,
        io: NetworkIO,
        *,
        name: str = "engine",
        runtime_cache: Path | None = None,
        own: Mapping[str, Tensor] | None = None,
        faults: Sequence[str] = (),
    ):
        self.io, self._api, self._engine, self._name = io, api, engine, name
        self._own: dict[str, Tensor] = dict(own or {})
        self._faults = faults
        self._names = self._check_engine()
        inputs = [info.name for info in io.inputs if info.name in self._names]
        self._profiles = [self._profile(index, inputs) for index in range(engine.num_optimization_profiles)]
        self._cache = api.runtime_cache(engine, runtime_cache) if runtime_cache else None
        self._contexts = [self._make_context(index) for index in range(len(self._profiles))]
        memory = api.context_bytes(engine) / 1e6
        logger.info("%s: %s, %d profiles, %.1f MB of memory per context", name, api, len(self._profiles), memory)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The ranges of shapes that the engine takes."""
        return tuple(self._profiles)

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        """Outputs with their sizes for inputs of the given shapes.

        Raises:
            SessionError: listing every input that is missing, unknown or of another shape.
        """
        from .session import infer_shapes

        return infer_shapes(self.io, {**{name: tuple(t.shape) for name, t in self._own.items()}, **inputs})

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Enqueue ``outputs`` from ``inputs`` on torch's current stream; aliased outputs are the very input tensors.

        Raises:
            SessionError: a name, shape, dtype or device differs from the network's.
            ShapeRangeError, BindingError, EngineRunError: as :meth:`enqueue`.
        """
        import torch

        from .session import SessionError, tensor_problems

        inputs = {**self._own, **inputs}
        problems = tensor_problems(self.io, inputs, outputs)
        for name, tensor in {**inputs, **outputs}.items():
            if not tensor.is_cuda or not tensor.is_contiguous():
                strided = "contiguous" if tensor.is_contiguous() else "not contiguous"
                problems.append(f"{name} is {strided} on {tensor.device}, expected contiguous on a GPU")
        if problems:
            raise SessionError(f"{self._name}: {'; '.join(problems)}")
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        given = {**inputs, **outputs}
        addresses = {name: given[name].data_ptr() for name in self._names}
        stream = torch.cuda.current_stream(given[next(iter(given))].device).cuda_stream
        self.enqueue(shapes, addresses, stream, capturing=torch.cuda.is_current_stream_capturing())

    def enqueue(
        self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], stream: int, *, capturing: bool = False
    ) -> None:
        """Enqueue one call; returns at once.

        Args:
            shapes: of every input.
            addresses: device address of every input and output; memory must stay until the call, and every
                graph captured from it, is through.
            stream: a ``cudaStream_t``, not the default stream.
            capturing: whether ``stream`` is being captured; only a call whose like has run before can be.

        Raises:
            ShapeRangeError: no profile covers the shapes.
            BindingError: an address is missing or not aligned, aliased tensors have different ones, or the call
                can't be captured.
            EngineRunError: TensorRT refused, with its messages.
        """
        shapes = {name: tuple(shape) for name, shape in shapes.items() if name in self._names}
        self._check_addresses(addresses)
        entry = self._entry(check_shapes(self._profiles, shapes), shapes)
        if capturing:
            if not (entry.warm and entry.shapes == shapes and self._is_capturable(entry, stream)):
                raise BindingError(
                    f"{self._name}: this call can't be captured; run it once outside of a capture, with these shapes, "
                    "and capture a stream on which TensorRT says it can"
                )
            entry.captured = True
        with self._api.messages():
            self._bind(entry, shapes, addresses, stream)
            if not entry.context.execute_async_v3(stream):
                entry.warm = False
                raise self._refusal("a call", entry, shapes)
        entry.warm = True

    def save_runtime_cache(self) -> None:
        """Keep the kernels that TensorRT-RTX compiled so far for the next start."""
        if self._cache:
            self._cache.save()

    def _check_engine(self) -> list[str]:
        """The names of the engine's inputs and outputs; raises where they differ from the network's."""
        engine, problems = self._engine, []
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        known = {info.name: ("INPUT", info) for info in self.io.inputs}
        known |= {info.name: ("OUTPUT", info) for info in self.io.outputs}
        # TensorRT may leave an input out that nothing reads, never an output.
        problems += [f"it has no output {info.name}" for info in self.io.outputs if info.name not in names]
        for name in names:
            mode = engine.get_tensor_mode(name).name
            if name not in known or known[name][0] != mode:
                problems.append(f"it has an {mode.lower()} {name}, which the network has not")
                continue
            wanted = str(known[name][1].dtype).removeprefix("torch.")
            kind = engine.get_tensor_dtype(name).name
            if DTYPE_NAMES.get(kind, kind.lower()) != wanted:
                problems.append(f"{name} is {DTYPE_NAMES.get(kind, kind.lower())}, the network's is {wanted}")
        # Before version 10, and where no plugin told it, TensorRT does not know which tensors share memory.
        ask = getattr(engine, "get_aliased_input_tensor", lambda name: None)
        for output, source in self.io.aliases.items():
            if output in names and (found := ask(output)) not in (None, "", source):
                problems.append(f"{output} shares the memory of {found}, in the network that of {source}")
        if problems:
            raise EngineLoadError(f"{self._name} is not of this network: {'; '.join(problems)}; build it again")
        return names

    def _profile(self, index: int, inputs: list[str]) -> dict[str, tuple[Shape, Shape, Shape]]:
        profile = {}
        for name in inputs:
            low, best, high = (tuple(dims) for dims in self._engine.get_tensor_profile_shape(name, index))
            profile[name] = (low, best, high)
        return profile

    def _make_context(self, profile: int) -> _Context:
        with self._api.messages():
            context = self._engine.create_execution_context(*([self._cache.config] if self._cache else []))
            if context is None:
                raise EngineLoadError(
                    f"{self._name}: {self._api} made no execution context, which takes "
                    f"{self._api.context_bytes(self._engine)} bytes of device memory; {self._api.said()}; free some, "
                    "capture fewer --request-counts, or build for less"
                )
        return _Context(context, profile)

    def _entry(self, profile: int, shapes: dict[str, Shape]) -> _Context:
        """The context for a call: the one captured with these shapes, else the profile's free one."""
        entries = [entry for entry in self._contexts if entry.profile == profile]
        for entry in entries:
            if entry.captured and entry.shapes == shapes:
                return entry
        free = next((entry for entry in entries if not entry.captured), None)
        if free is None:
            free = self._make_context(profile)
            self._contexts.append(free)
        return free

    def _check_addresses(self, addresses: Mapping[str, int]) -> None:
        problems = [f"{name} has no address" for name in self._names if not addresses.get(name)]
        problems += [
            f"{name} is at {addresses[name]:#x}, not aligned to {ALIGNMENT} bytes"
            for name in self._names
            if addresses.get(name, 0) % ALIGNMENT
        ]
        for output, source in self.io.aliases.items():
            if addresses.get(output) != addresses.get(source):
                problems.append(f"{output} and {source} have different addresses; bind one, it is updated in place")
        if problems:
            raise BindingError(f"{self._name}: {'; '.join(problems)}")

    def _bind(self, entry: _Context, shapes: dict[str, Shape], addresses: Mapping[str, int], stream: int) -> None:
        """Tell the context what changed since its last call."""
        context = entry.context
        done = True
        if context.active_optimization_profile != entry.profile:
            # On the call's own stream, so that the call comes after it.
            done = context.set_optimization_profile_async(entry.profile, stream)
        if entry.shapes != shapes:
            entry.warm = False
            for name, shape in shapes.items():
                if entry.shapes.get(name) != shape:
                    done = done and context.set_input_shape(name, shape)
            entry.shapes = shapes if done else {}
        for name in self._names:
            if entry.addresses.get(name) != addresses[name]:
                done = done and context.set_tensor_address(name, addresses[name])
                entry.addresses[name] = addresses[name] if done else 0
        if not done:
            raise self._refusal("shapes or addresses", entry, shapes)

    def _refusal(self, what: str, entry: _Context, shapes: Mapping[str, Shape]) -> EngineRunError:
        """What to raise where TensorRT refused what its profile covers; names the sizes that calls choose."""
        ranges = self._profiles[entry.profile].items()
        chosen = [f"{name} {list(shapes[name])}" for name, (low, _, high) in ranges if low != high]
        return EngineRunError(
            f"{self._name}: {self._api} refused {what} of {', '.join(chosen)}, which profile {entry.profile} covers; "
            f"{self._api.said(self._faults)}; build the engines again with dspark-build, or use the torch backend"
        )

    @staticmethod
    def _is_capturable(entry: _Context, stream: int) -> bool:
        ask = getattr(entry.context, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))


def open_session(
    directory: EngineDir,
    kind: Kind,
    rank: int,
    api: TensorRT,
    *,
    world_size: int | None = None,
    mailbox: Tensor | None = None,
) -> TensorRTSession:
    """The session of one engine of a directory, for torch's current device. What is cheap is checked first.

    Args:
        world_size: ranks that were started; left out, as many as the directory is for.
        mailbox: peer addresses [P, 2] int32 on the device, of a network of several ranks.

    Raises:
        EngineDirError: the directory is for another TensorRT, GPU or number of ranks, or the plan is damaged.
        EngineLoadError: there is no GPU or no mailbox, a plugin is missing, or TensorRT refused the plan.
        KernelUnavailableError: there is no usable plugin library.
    """
    import torch

    from ..builder.build_config import Lowering
    from ..builder.engine_dir import engine_file_name, network_io
    from ..plugins.registry import ALL_OPS
    from ..plugins.trt_plugin import registered_creators

    name = f"{kind} engine of rank {rank}"
    gpus = gpu_compute_capabilities()
    if not gpus:
        raise EngineLoadError(f"{name}: engines run on a GPU, and torch finds none here; use the torch backend")
    directory.check_runtime(
        api.product, api.version, gpus[torch.cuda.current_device()], world_size or directory.tp_size
    )
    io = network_io(kind, directory, directory.build)
    own = {"mailbox": mailbox} if mailbox is not None else {}
    if directory.tp_size > 1 and directory.build.lowering is Lowering.NATIVE:
        raise EngineLoadError(
            f"{name}: native engines of {directory.tp_size} ranks reduce by TensorRT's own collectives, which this "
            "runtime does not drive; build with the plugin lowering, or use the torch backend"
        )
    if directory.tp_size > 1 and mailbox is None:
        raise EngineLoadError(
            f"{name}: engines of {directory.tp_size} ranks reduce through a mailbox, none was given; pass the tensor "
            "of Mailbox.create(), as open_decoder() does"
        )
    plan = directory.read_plan(kind, rank)
    with registered_creators(api, [ALL_OPS[op] for op in directory.plugins]) as failures:
        engine = api.deserialize(plan, failures.errors)
    path = directory.path / f"{engine_file_name(kind, rank)}.kernels"
    return TensorRTSession(api, engine, io, name=name, runtime_cache=path, own=own, faults=failures.errors)
