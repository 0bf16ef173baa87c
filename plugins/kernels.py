"""Launches the CUDA kernels of ``libdspark_plugins.so``.

References are what an operation computes by default; inside :func:`kernel_scope` calls on CUDA tensors
launch kernels instead, on torch's current stream. TensorRT plugins call :func:`launch` directly with the
addresses that an engine hands them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .abi import STATUS, c_name, fill_params
from .library import KernelUnavailableError, load_library
from .op import Op, OpError, executor_scope


class KernelError(RuntimeError):
    """A kernel refused a call."""


def launch(
    op: Op,
    attributes: Any,
    activation: str,
    sizes: Mapping[str, int],
    pointers: Mapping[str, int],
    workspace: int,
    stream: int,
) -> None:
    """Enqueue an operation's kernels; returns at once.

    Args:
        activation: "bfloat16", "float16" or "float32".
        sizes: symbol of the declaration -> size.
        pointers: name of an input or output -> device address.
        workspace: device address of :func:`workspace_bytes` bytes.
        stream: a ``cudaStream_t``.

    Raises:
        KernelUnavailableError: the library lacks this operation.
        KernelError: the kernel refused the call; the message says why.
    """
    params = fill_params(op, attributes, activation, sizes, pointers, workspace)
    status = _function(c_name(op))(params, stream)
    if status:
        reason = STATUS.get(status, f"status {status}")
        raise KernelError(
            f"{op.name}: {reason}; activation {activation}, sizes {dict(sizes)}, {attributes}. Its file in "
            "cpp_plugins/kernels says what it takes; on a CPU (--device cpu) it runs as its reference"
        )


def workspace_bytes(op: Op, attributes: Any, activation: str, sizes: Mapping[str, int]) -> int:
    """Bytes of scratch memory that a call of these sizes needs; it needs no initialisation.

    Raises:
        KernelUnavailableError: there is no usable library, or it lacks this operation.
    """
    params = fill_params(op, attributes, activation, sizes, {})
    return int(_function(f"{c_name(op)}_workspace")(params))


def has_kernel(op: Op) -> bool:
    """Whether the library on this machine implements ``op``.

    Raises:
        KernelUnavailableError: there is no usable library.
    """
    return hasattr(load_library(), c_name(op))


@contextmanager
def kernel_scope() -> Iterator[None]:
    """Run operations on CUDA tensors by kernel inside the ``with`` block.

    Raises:
        KernelUnavailableError: there is no usable library; inside of the block, it lacks an operation.
    """
    load_library()
    with executor_scope(execute):
        yield


def execute(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: Mapping[str, Any]) -> Any:
    """The outputs of one operation, enqueued on torch's current stream; an :data:`~.op.OpExecutor`.

    Raises:
        OpError: a tensor is not contiguous.
        KernelUnavailableError: the tensors are on a GPU, and there is no usable library, or it lacks this operation.
        KernelError: the kernel refused the call.
    """
    if not tensors[0].is_cuda:
        return op.reference(attributes, *tensors)
    device, activation = tensors[0].device, bindings.get("T", torch.float32)
    specs, inputs = op.outputs(attributes), op.inputs(attributes)
    outputs = allocate_outputs(op, attributes, tensors, bindings)
    strided = [s.name for s, t in zip(inputs, tensors, strict=True) if not t.is_contiguous()]
    if strided:
        raise OpError(f"{op.name}: {', '.join(strided)} must be contiguous; call .contiguous() where a copy is meant")
    sizes = {k: int(v) for k, v in bindings.items() if k != "T"}
    name = str(activation).removeprefix("torch.")
    scratch = torch.empty(workspace_bytes(op, attributes, name, sizes), dtype=torch.uint8, device=device)
    pointers = {s.name: t.data_ptr() for s, t in zip((*inputs, *specs), (*tensors, *outputs), strict=True)}
    stream = torch.cuda.current_stream(device).cuda_stream
    launch(op, attributes, name, sizes, pointers, scratch.data_ptr(), stream)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def allocate_outputs(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: Mapping[str, Any]) -> list[Tensor]:
    """Tensors for an operation's outputs on the device of its inputs, not initialised; aliased ones are the inputs."""
    dtypes = {"T": bindings.get("T"), "float32": torch.float32, "int32": torch.int32, "int8": torch.int8}
    aliases, outputs = op.aliases(attributes), []
    for i, spec in enumerate(op.outputs(attributes)):
        if i in aliases:
            outputs.append(tensors[aliases[i]])
            continue
        shape = [dim if isinstance(dim, int) else bindings[dim] for dim in spec.dims]
        outputs.append(torch.empty(shape, dtype=dtypes[spec.dtype], device=tensors[0].device))
    return outputs


def _function(name: str) -> Any:
    library = load_library()
    try:
        function = getattr(library, name)
    except AttributeError:
        raise KernelUnavailableError(
            f"{library._name} has no {name}, expected one for every operation; build it again from cpp_plugins"
        ) from None
    if name.endswith("_workspace"):
        function.restype = ctypes.c_size_t
        return lambda params: function(ctypes.byref(params))
    return lambda params, stream: function(ctypes.byref(params), ctypes.c_void_p(stream))
