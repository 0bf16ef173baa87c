"""Where a rank computes: its device, how operations run on it, and what connects it with the other ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..builder.engine_dir import EngineDir
from ..plugins.kernels import execute
from ..plugins.library import load_library
from ..plugins.op import OpExecutor, executor_scope
from .boundary import FUSED_MHC_MAX_ROWS, BoundaryError, Facts, Route, plan
from .communicator import Communicator, LaunchError
from .mailbox import Mailbox, MailboxError
from .session import OperationScope
from .side_stream import SideStream
from .stock import Group, boundary_scope, open_group

logger = logging.getLogger(__name__)

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Platform:
    """What the sessions of a rank compute with: the device, and how operations run on it."""

    device: torch.device
    scope: OperationScope = nullcontext
    mailbox: Mailbox | None = None
    group: Group | None = None
    """Collectives on the device, where a call may need them."""

    @property
    def mailbox_tensor(self) -> Tensor | None:
        """The kernels' input of peer addresses, [ranks, 2] int32; None without a mailbox."""
        return self.mailbox.tensor if self.mailbox else None

    def close(self) -> None:
        """Every rank calls this, after its last kernel has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group:
            self.group.close()
        if self.mailbox:
            self.mailbox.close()


def open_platform(
    directory: EngineDir, communicator: Communicator, device: torch.device, *, side_stream: bool, peer_timeout_s: float
) -> Platform:
    """A GPU with kernels, a mailbox to the other ranks if there can be one, and NCCL for what the mailbox can't carry.

    NCCL carries boundaries of many rows (all of them if there is no mailbox), and the logits of drafts whose sampling
    is split by requests.

    Raises:
        KernelUnavailableError: no kernel library can be loaded.
        BoundaryError: the same on every rank: their activation types differ.
        StockError: NCCL is needed and can't be set up.
    """
    torch.cuda.set_device(device)
    load_library()
    side = SideStream(device)
    inner: OpExecutor = side.execute if side_stream else execute
    if communicator.size == 1:

        @contextmanager
        def alone() -> Iterator[None]:
            with sums_in_float32(), side.joined(), executor_scope(inner):
                yield

        return Platform(device, alone)
    dtype = getattr(torch, directory.build.dtype)
    mailbox, problem = None, ""
    try:
        mailbox = Mailbox.create(communicator, directory.draft.hidden_size, dtype, device, timeout_s=peer_timeout_s)
    except MailboxError as error:  # the same on every rank
        problem = str(error)
    facts = Facts.gather(communicator, dtype, problem)
    chosen = plan(most_rows(directory), facts)
    if chosen.route is Route.STOCK and communicator.rank == 0:
        logger.warning("boundaries use NCCL in the largest calls or in all: %s", chosen.reason)
    needed = chosen.route is Route.STOCK or directory.build.request_split_from > 0
    group = open_group(communicator, device) if needed else None
    reduce = group.all_reduce if group else _never

    @contextmanager
    def together() -> Iterator[None]:
        with sums_in_float32(), side.joined(), boundary_scope(facts, reduce, inner):
            yield

    return Platform(device, together, mailbox, group)


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Inside, products of 16-bit operands are summed in float32 throughout; torch would let parts of a sum meet in 16
    bits. Its switches are of the whole process, which has them back afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def open_engine_platform(
    directory: EngineDir, communicator: Communicator, device: torch.device, *, peer_timeout_s: float
) -> Platform:
    """A GPU for engines, whose boundaries can only use the mailbox.

    Raises:
        LaunchError: the largest step has more rows than the mailbox holds.
        MailboxError: the ranks' GPUs can't reach each other.
    """
    torch.cuda.set_device(device)
    if communicator.size == 1:
        return Platform(device)
    rows = directory.build.max_batch_size * (directory.draft.block_size + 1)
    if rows > FUSED_MHC_MAX_ROWS:
        raise LaunchError(
            f"steps of {directory.build.max_batch_size} requests have {rows} rows, boundaries inside engines of "
            f"several ranks take {FUSED_MHC_MAX_ROWS}; build with a smaller --max-batch-size, or pass --backend torch"
        )
    dtype = getattr(torch, directory.build.dtype)
    hidden = directory.draft.hidden_size
    return Platform(device, mailbox=Mailbox.create(communicator, hidden, dtype, device, timeout_s=peer_timeout_s))


def most_rows(directory: EngineDir) -> int:
    """Rows of the largest call of either network."""
    build = directory.build
    return max(build.max_input_len, build.max_batch_size * (directory.draft.block_size + 1))


def _never(tensor: Tensor) -> Tensor:
    raise BoundaryError(
        "a boundary has more rows than any call of these engines, so NCCL was not opened for it; keep calls within "
        "their --max-input-len and --max-batch-size, or build with larger ones"
    )


def rank_device(communicator: Communicator, choice: DeviceChoice) -> torch.device:
    """Where this rank computes: a GPU of its own, or the CPU; the same kind on every rank.

    Ranks of a node take its GPUs in order, or, where each rank sees only one, the one they see.

    Raises:
        LaunchError: the same on every rank; GPUs were asked for and a rank has none, or shares one.
    """
    if choice == "cpu":
        return torch.device("cpu")
    hosts = communicator.all_gather_object(socket.gethostname())
    local = hosts[: communicator.rank].count(hosts[communicator.rank])
    count = torch.cuda.device_count()
    index = local if count > local else 0
    found = (hosts[communicator.rank], str(torch.cuda.get_device_properties(index).uuid)) if count else None
    everyone = communicator.all_gather_object(found)
    problems = [f"rank {rank} on {hosts[rank]} has none" for rank, gpu in enumerate(everyone) if gpu is None]
    problems += [
        f"rank {rank} shares that of rank {everyone.index(gpu)} on {hosts[rank]}"
        for rank, gpu in enumerate(everyone)
        if gpu is not None and everyone.index(gpu) != rank
    ]
    if not problems:
        return torch.device("cuda", index)
    reason = f"every rank needs a GPU of its own: {'; '.join(problems)}"
    if choice == "cuda":
        raise LaunchError(f"{reason}. Start fewer ranks on that node, or pass --device cpu")
    if any(everyone) and communicator.rank == 0:
        logger.warning("decoding on the CPU: %s", reason)
    return torch.device("cpu")
