"""The stock path: collectives of all ranks, and boundaries as an all-reduce followed by separate operations.

On GPUs the collectives are NCCL's, through torch.distributed, which works between nodes and without peer access. On
CPUs they are the communicator's gather, and the all-reduce sums in rank order, with the bits of the fused operation.
NCCL sums in an order of its own: in float32, rounded once, with the same bits on every rank, but not always those of
the rank-ordered sum (the bounds of spec 8.2 hold). The rest of a boundary runs as on a single rank: mix, collapse and
norm.

:func:`boundary_scope` asks :func:`.boundary.plan` for each boundary. Sampling that is split by vocabulary uses the
mailbox too; where there is none, its reference runs and gathers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plugins.hc_collapse import HC_COLLAPSE
from ..plugins.kernels import execute
from ..plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from ..plugins.mhc_all_reduce import (
    MHC_ALL_REDUCE,
    MHC_ALL_REDUCE_RESIDUAL_ONLY,
    quantized_outputs,
    reduce_ranks,
)
from ..plugins.numerics import rms_norm
from ..plugins.op import Op, OpExecutor, executor_scope
from .boundary import Facts, Route, plan
from .communicator import Communicator


class StockError(RuntimeError):
    """The stock collectives can't be set up."""


class Group(Protocol):
    """Collectives of all ranks, which every rank calls in the same order; results are new tensors."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, added in float32 and rounded once; the same bits on every rank."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``tensor`` of every rank, [tp, ...] in rank order."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """What every rank has for this one, [tp, ...]; ``tensor`` [tp, ...] is what this one has for each."""
        ...

    def close(self) -> None: ...


class HostGroup:
    """What the communicator gathers through host memory, and its sum in rank order."""

    def __init__(self, communicator: Communicator):
        self._communicator = communicator

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return reduce_ranks(self._communicator.all_gather(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._communicator.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._communicator.all_gather(tensor)[:, self._communicator.rank]

    def close(self) -> None:
        pass


class DistributedGroup:
    """The collectives of torch.distributed, asynchronous on torch's current stream with NCCL, which can be captured.

    Made by every rank at the same time. Rank 0 opens a store on a free port, the communicator tells the others
    where, and through the store they find each other: no environment variable and no fixed port is needed.

    Args:
        device: of the tensors.
        backend: "nccl"; "gloo" serves CPUs.
        timeout_s: how long ranks wait for each other, here and in a call, before the job is ended.

    Raises:
        StockError: torch.distributed lacks the backend, or this process has a default group already.
    """

    def __init__(
        self, communicator: Communicator, device: torch.device, *, backend: str = "nccl", timeout_s: float = 60.0
    ):
        rank, size = communicator.rank, communicator.size
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise StockError(
                f"rank {rank}: torch {torch.__version__} has no {backend} backend, the stock collectives need it; "
                "install a torch that has, or run ranks that share a mailbox"
            )
        if dist.is_initialized():
            raise StockError(
                f"rank {rank}: torch.distributed has a default group already, expected none; close the decoder that "
                "made it, or destroy it, before the engines are opened"
            )
        timeout = timedelta(seconds=timeout_s)
        hosts = communicator.all_gather_object(socket.gethostname())
        host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
        store = None
        if rank == 0:
            store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        port = communicator.broadcast(None if store is None else store.port)
        store = store or dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
        with _without_multicast() if backend == "nccl" else nullcontext():
            # With a device, NCCL starts here and now, and reads its variables.
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        self._size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self._size, *tensor.shape))
        # The newer name first: the older one warns where both are.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered.view(-1), tensor.contiguous().view(-1))
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous())
        return received

    def close(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _without_multicast() -> Iterator[None]:
    """NCCL without multicast in the switches, which may be there and not work and then ends NCCL. Whoever has set the
    variable decides."""
    name = "NCCL_NVLS_ENABLE"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def open_group(communicator: Communicator, device: torch.device) -> Group:
    """NCCL's collectives for a GPU, those through the host for a CPU; every rank calls this.

    Raises:
        StockError: as :class:`DistributedGroup`.
    """
    return DistributedGroup(communicator, device) if device.type == "cuda" else HostGroup(communicator)


def stock_executor(all_reduce: Callable[[Tensor], Tensor], inner: OpExecutor = execute) -> OpExecutor:
    """An executor that computes boundaries between ranks as separate operations, and the rest by ``inner``."""

    def one_rank(op: Op, attributes: Any, *tensors: Tensor) -> Any:
        return inner(op, attributes, tensors, op.bind(attributes, tensors))

    def run(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: dict[str, Any]) -> Any:
        if not between_ranks(op, attributes):
            return inner(op, attributes, tensors, bindings)
        partial, streams, post, comb, *rest = tensors[:-1]  # the mailbox is the last, and not used
        residual = MHC_ALL_REDUCE_RESIDUAL_ONLY
        alone = residual.attributes_type(tp_size=1)
        mixed = one_rank(residual, alone, all_reduce(partial), streams, post, comb)
        if op is residual:
            return mixed
        pre, norm_weight = rest
        hidden = one_rank(HC_COLLAPSE, HC_COLLAPSE.attributes_type(), mixed, pre)
        normed = rms_norm(hidden, norm_weight, attributes.norm_eps)
        return mixed, hidden, normed, *quantized_outputs(normed, attributes)

    return run


def between_ranks(op: Op, attributes: Any) -> bool:
    """Whether a call of an operation is a boundary that several ranks meet at."""
    return op in (MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY) and attributes.tp_size > 1


@contextmanager
def boundary_scope(facts: Facts, all_reduce: Callable[[Tensor], Tensor], inner: OpExecutor = execute) -> Iterator[None]:
    """Run operations by ``inner`` inside the ``with`` block, but the boundaries that :func:`.boundary.plan` sends
    the stock way as separate operations with ``all_reduce``, and split sampling without a mailbox as its reference."""
    stock = stock_executor(all_reduce, inner)

    def run(op: Op, attributes: Any, tensors: Sequence[Tensor], bindings: dict[str, Any]) -> Any:
        if op is MARKOV_SAMPLING_SHARDED and plan(1, facts).route is Route.STOCK:
            return op.reference(attributes, *tensors)
        go_stock = between_ranks(op, attributes) and plan(int(bindings["rows"]), facts).route is Route.STOCK
        return (stock if go_stock else inner)(op, attributes, tensors, bindings)

    with executor_scope(run):
        yield
