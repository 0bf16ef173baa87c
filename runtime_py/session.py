"""Executes one network of one rank behind one interface.

A session takes named tensors, writes into tensors that the caller owns, and is asynchronous where the
device is. Caches are aliased: the same tensor is given as input and output and is updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..builder.network import Network, NetworkIO, TensorInfo
from ..plugins.collective import collective_scope
from .communicator import Communicator
from .stock import Group


class SessionError(ValueError):
    """A session was given tensors that its network does not take."""


class Session(Protocol):
    """One network of one rank, ready to run."""

    io: NetworkIO
    """Names, dtypes and shapes of inputs and outputs, and which outputs alias which inputs."""

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        """Every output's name, dtype and shape for inputs of the given shapes; nothing runs.

        Args:
            inputs: shapes of all inputs but the mailbox, which a session brings itself.

        Raises:
            SessionError: listing every input that is missing, unknown or of another shape.
        """
        ...

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Compute ``outputs`` from ``inputs``, on the current stream where the device is a GPU; may return before the
        results are there.

        Args:
            inputs: every input but the mailbox, with the names, dtypes and shapes of ``io``.
            outputs: tensors of the caller that receive the results; an aliased one must be its input's tensor.

        Raises:
            SessionError: a name, shape or dtype differs from the network's; nothing was written.
        """
        ...


OperationScope = Callable[[], AbstractContextManager[None]]
"""What a network runs in: a scope that decides how operations are computed."""


class TorchSession:
    """Runs the torch definition of a network, eagerly, on the device that holds its weights.

    Args:
        network: stays on the device that it is on; the tensors of every call must be there too.
        scope: how operations are computed: by reference when left out, by kernel inside
            :func:`~dspark_trt.plugins.kernels.kernel_scope`.
        mailbox: peer addresses [P, 2] int32 for the kernels of a tensor-parallel network.
        group: collectives on the device, for what no kernel exchanges; ``communicator`` gathers when left out.
    """

    def __init__(
        self,
        network: Network,
        communicator: Communicator,
        *,
        scope: OperationScope = nullcontext,
        mailbox: Tensor | None = None,
        group: Group | None = None,
    ):
        self.network, self.io, self._scope = network, network.io, scope
        self._collectives = (group.all_gather, group.all_to_all) if group else (communicator.all_gather, None)
        names = {i.name: i for i in network.io.inputs}
        self._own: dict[str, Tensor] = {}
        if (info := names.get("mailbox")) is not None:
            self._own["mailbox"] = torch.zeros(fixed_shape(info), dtype=info.dtype) if mailbox is None else mailbox

    def infer_shapes(self, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        """Outputs with their sizes for inputs of the given shapes.

        Raises:
            SessionError: listing every input that is missing, unknown or of another shape.
        """
        return infer_shapes(self.io, {**{name: tuple(t.shape) for name, t in self._own.items()}, **inputs})

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Compute ``outputs`` from ``inputs``; aliased outputs must be the very input tensors.

        Raises:
            SessionError: a name, shape or dtype differs from the network's, before anything is written.
        """
        inputs = {**self._own, **inputs}
        if problems := tensor_problems(self.io, inputs, outputs):
            raise SessionError("; ".join(problems))
        with torch.inference_mode(), collective_scope(*self._collectives), self._scope():
            results = self.network(*(inputs[i.name] for i in self.io.inputs))
            for info, result in zip(self.io.outputs, results, strict=True):
                outputs[info.name].copy_(result)


def infer_shapes(io: NetworkIO, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """As :meth:`TorchSession.infer_shapes`, from the network's names and shapes alone.

    Raises:
        SessionError: listing every input that is missing, unknown or of another shape, and every dimension of 0.
    """
    problems = [f"{name} is not an input" for name in inputs if name not in {i.name for i in io.inputs}]
    sizes: dict[str, int] = {}
    for info in io.inputs:
        shape = inputs.get(info.name)
        if shape is None:
            problems.append(f"{info.name} is missing")
            continue
        expected = [
            sizes.setdefault(d, s) if isinstance(d, str) else d for d, s in zip(info.shape, shape, strict=False)
        ]
        if len(shape) != len(info.shape) or list(shape) != expected:
            problems.append(f"{info.name} has shape {list(shape)}, expected {list(info.shape)} with {sizes}")
    problems += [f"{d} is 0, expected at least 1" for d, s in sizes.items() if s == 0]
    if problems:
        raise SessionError("; ".join(problems))
    return {
        o.name: TensorInfo(o.name, o.dtype, tuple(sizes[d] if isinstance(d, str) else d for d in o.shape))
        for o in io.outputs
    }


def tensor_problems(io: NetworkIO, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> list[str]:
    """What keeps tensors from being the inputs and outputs of a call, a line each.

    Raises:
        SessionError: inputs are missing, unknown or of another shape.
    """
    shapes = infer_shapes(io, {name: tuple(t.shape) for name, t in inputs.items()})
    problems = [
        f"{i.name} is {inputs[i.name].dtype}, expected {i.dtype}" for i in io.inputs if inputs[i.name].dtype != i.dtype
    ]
    for info in shapes.values():
        given = outputs.get(info.name)
        if given is None or tuple(given.shape) != info.shape or given.dtype != info.dtype:
            found = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
            problems.append(f"output {info.name} is {found}, expected {info.dtype} {list(info.shape)}")
    for output, source in io.aliases.items():
        if output in outputs and outputs[output].data_ptr() != inputs[source].data_ptr():
            problems.append(f"output {output} must be bound to the tensor of {source}, it is updated in place")
    return problems


def fixed_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor that has no dynamic dimension."""
    return tuple(int(size) for size in info.shape)


def make_caches(session: Session, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A session's caches, zeroed: input name -> tensor."""
    names = set(session.io.aliases.values())
    inputs = (i for i in session.io.inputs if i.name in names)
    return {i.name: torch.zeros(fixed_shape(i), dtype=i.dtype, device=device) for i in inputs}


def make_outputs(session: Session, inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for a session's outputs, on the device of its inputs; aliased ones are the caches themselves."""
    shapes = {name: tuple(t.shape) for name, t in inputs.items()}
    device = next(iter(inputs.values())).device
    outputs = {}
    for name, info in session.infer_shapes(shapes).items():
        source = session.io.aliases.get(name)
        outputs[name] = caches[source] if source else torch.empty(fixed_shape(info), dtype=info.dtype, device=device)
    return outputs
