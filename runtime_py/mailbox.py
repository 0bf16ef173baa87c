"""The memory through which kernels exchange rows and candidates between the GPUs of a node.

Every rank allocates one region, fills it with the values that mean "empty", and maps the regions of all ranks. The
kernels do the rest by plain stores to peers: ``cpp_plugins/kernels/mailbox.cuh`` and ``markov_exchange.cuh`` describe
the protocols, :mod:`dspark_trt.plugins.mhc_all_reduce` and :mod:`dspark_trt.plugins.markov_sampling_sharded` define the
layout. A region is a plain ``cudaMalloc`` of its own, so that its IPC handle needs no offset and no allocator setting
can break it.

A kernel whose peer stays silent does not spin for ever: it records the fault in its region and goes on with invalid
results. :meth:`Mailbox.check` turns the fault into an error; call it before results are used.
"""

from __future__ import annotations

import ctypes
import socket
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..plugins import mhc_all_reduce as layout
from ..plugins.markov_sampling_sharded import exchange_bytes
from .communicator import Communicator
from .cuda_runtime import CudaRuntimeError, cuda_runtime

RANKS = (2, 4, 8)
NAMED_RANKS = f"{', '.join(map(str, RANKS[:-1]))} or {RANKS[-1]} ranks"
_REMEDY = "torch sessions go on through NCCL without it; for engines, which can't, pass --backend torch"
_BLOCK_BYTES = 2 << 20  # cudaMalloc gives an allocation of whole blocks to nobody else
_SENTINELS = {torch.bfloat16: 0x80008000, torch.float16: 0x80008000, torch.float32: 0x80000000}

R = TypeVar("R")


class MailboxError(RuntimeError):
    """Peer memory can't be set up, or a rank stayed silent."""


class PeerMemory(Protocol):
    """Device memory that other processes can map; every method raises :class:`MailboxError`."""

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def write(self, address: int, data: np.ndarray) -> None: ...

    def read(self, address: int, size: int) -> bytes: ...

    def export(self, address: int) -> bytes:
        """A handle of the allocation at ``address`` for other processes."""
        ...

    def map(self, handle: bytes) -> int: ...

    def unmap(self, address: int) -> None: ...


class Mailbox:
    """The regions of all ranks as one rank sees them. Made by :meth:`create`, ended by :meth:`close`."""

    tensor: Tensor
    """The kernels' input [ranks, 2] int32: addresses of this rank's region and of those after it, cyclically."""

    def __init__(
        self, communicator: Communicator, memory: PeerMemory, own: int, peers: list[int], device: torch.device
    ) -> None:
        self._communicator, self._memory, self._own, self._peers = communicator, memory, own, peers
        halves = np.array([own, *peers], np.uint64).view(np.int32).reshape(-1, 2)
        self.tensor = torch.from_numpy(halves.copy()).to(device)

    @classmethod
    def create(
        cls,
        communicator: Communicator,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        timeout_s: float = 10.0,
        memory: PeerMemory | None = None,
    ) -> Mailbox:
        """Set up the mailbox; every rank calls this, and all of them succeed or all raise.

        Args:
            hidden_size: channels of a row.
            dtype: activation type of the calls.
            timeout_s: how long a kernel waits for a peer before it gives up.
            memory: stands in for the GPU in tests.

        Raises:
            MailboxError: the same on every rank, naming the ranks that failed and why.
        """
        rank, size = communicator.rank, communicator.size
        header = {"ranks": size, "hidden": hidden_size, "channel_bytes": dtype.itemsize}
        header["timeout_ms"] = max(1, round(timeout_s * 1000))
        if size not in RANKS or dtype not in _SENTINELS or hidden_size < 1:
            raise MailboxError(
                f"a mailbox for {size} ranks, {hidden_size} channels of {dtype} was asked for; the kernels take "
                f"{NAMED_RANKS} and {list(_SENTINELS)}; {_REMEDY}"
            )
        facts = {**header, "host": socket.gethostname()}

        own, handle, problem = None, None, None
        if memory is None:
            memory, problem = _attempt(partial(CudaMemory, device))
        if memory is not None:
            own, problem = _attempt(partial(memory.allocate, region_bytes(size, hidden_size, dtype)))
        if memory is not None and own is not None:
            handle, problem = _attempt(partial(_fill, memory, own, {**header, "rank": rank}, dtype))
        # Every region is filled before any rank knows its handle.
        everyone = communicator.all_gather_object((facts, handle, problem))
        problems = [f"rank {r}: {p}" for r, (_, _, p) in enumerate(everyone) if p]
        wanted = everyone[0][0]
        problems += [
            f"rank {r} has {found}, rank 0 {wanted}" for r, (found, *_) in enumerate(everyone) if found != wanted
        ]
        peers: list[int] = []
        if not problems:
            assert memory is not None and own is not None
            for step in range(1, size):
                address, problem = _attempt(partial(memory.map, everyone[(rank + step) % size][1]))
                if address is None:
                    break
                peers.append(address)
            mapped = communicator.all_gather_object(problem)
            problems = [f"rank {r}: {p}" for r, p in enumerate(mapped) if p]
        if problems:
            # Whatever fails here too, the others wait for this rank.
            given_back = [_attempt(partial(memory.unmap, address))[1] for address in peers if memory]
            communicator.barrier()
            if memory and own is not None:
                given_back.append(_attempt(partial(memory.free, own))[1])
            everything = communicator.all_gather_object(given_back)
            problems += [f"rank {r}: {why}" for r, whys in enumerate(everything) for why in whys if why]
            raise MailboxError(
                f"no mailbox between the GPUs of {size} ranks: {'; '.join(dict.fromkeys(problems))}. It needs one node "
                f"and peer access between its GPUs; {_REMEDY}"
            )
        assert memory is not None and own is not None
        return cls(communicator, memory, own, peers, device)

    def check(self) -> None:
        """Raise :class:`MailboxError` if a kernel gave up waiting; copies four bytes, not during a capture."""
        fault = self._word("fault")
        rank = self._communicator.rank
        if fault == layout.MAILBOX_MISFIT:
            raise MailboxError(
                f"rank {rank}: an operation was called with other channels, ranks or activations than the mailbox "
                "was made for; end the job and build the engines of all ranks again, in one run of dspark-build"
            )
        if fault:
            raise MailboxError(
                f"rank {rank}: rank {fault - layout.MAILBOX_SILENT_RANK} sent nothing for "
                f"{self._word('timeout_ms') / 1000:g} s; it ended, hangs, or runs other operations than this rank. "
                "The results of this step are void, end the job"
            )

    def fault(self) -> Tensor:
        """The fault as int32 [1] on the device, so that a step can send it to the host with its results. It is
        the mailbox's own memory: not to be used after :meth:`close`."""
        address = self._own + 4 * layout.MAILBOX_WORDS["fault"]
        return torch.as_tensor(_DeviceWord(address), device=self.tensor.device)

    def close(self) -> None:
        """Unmap and free; every rank calls this, after its last kernel has ended."""
        if not self._own:
            return
        for address in self._peers:
            self._memory.unmap(address)
        # Memory that a peer still maps must not go.
        self._communicator.barrier()
        self._memory.free(self._own)
        self._own, self._peers = 0, []

    def __del__(self) -> None:
        if getattr(self, "_own", 0):
            warnings.warn("a Mailbox was dropped without close(); its memory stays", ResourceWarning, stacklevel=2)

    def _word(self, name: str) -> int:
        return int.from_bytes(self._memory.read(self._own + 4 * layout.MAILBOX_WORDS[name], 4), "little")


def region_bytes(ranks: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's region: the header, the slots of rows, and the words of sampling."""
    return layout.MAILBOX_HEADER_BYTES + slot_bytes(ranks, hidden_size, dtype) + exchange_bytes(ranks)


def slot_bytes(ranks: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of slots [generation][source rank][row][channel]."""
    return layout.MAILBOX_GENERATIONS * ranks * layout.MAILBOX_ROWS * hidden_size * dtype.itemsize


def _fill(memory: PeerMemory, address: int, header: dict[str, int], dtype: torch.dtype) -> bytes:
    """Write header, sentinels and empty words; return the region's handle."""
    ranks = header["ranks"]
    size = slot_bytes(ranks, header["hidden"], dtype)
    words = np.zeros(layout.MAILBOX_HEADER_BYTES // 4, np.int32)
    for name, value in header.items():
        words[layout.MAILBOX_WORDS[name]] = value
    memory.write(address, words)
    pattern = np.full(min(size, 16 << 20) // 4, _SENTINELS[dtype], np.uint32).view(np.uint8)
    slots = address + layout.MAILBOX_HEADER_BYTES
    for start in range(0, size, pattern.size):
        memory.write(slots + start, pattern[: size - start])
    memory.write(slots + size, np.zeros(exchange_bytes(ranks), np.uint8))
    return memory.export(address)


def _attempt(action: Callable[[], R]) -> tuple[R | None, str | None]:
    """The result, or why there is none: a rank that fails must still take part in the next collective."""
    try:
        return action(), None
    except MailboxError as error:
        return None, str(error)


class _DeviceWord:
    """Four bytes of device memory, as torch takes over foreign memory."""

    def __init__(self, address: int):
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (address, False), "version": 3}


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]  # cudaIpcMemHandle_t


class CudaMemory:
    """The few calls of the CUDA runtime that peer memory needs, on one device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.cuda is None:
            raise MailboxError(f"peer memory was asked for on {device}, with torch {torch.__version__}; it needs a GPU")
        torch.cuda.init()
        self._device = device
        try:
            self._runtime = cuda_runtime()
        except CudaRuntimeError as error:
            raise MailboxError(str(error)) from None
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        rounded = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(rounded))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def write(self, address: int, data: np.ndarray) -> None:
        source = ctypes.c_void_p(data.ctypes.data)
        self._call("cudaMemcpy", ctypes.c_void_p(address), source, ctypes.c_size_t(data.nbytes), 1)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._call("cudaMemcpy", buffer, ctypes.c_void_p(address), ctypes.c_size_t(size), 2)
        return buffer.raw

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        lazy_peer_access = ctypes.c_uint(1)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazy_peer_access)
        return int(address.value or 0)

    def unmap(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            status = getattr(self._runtime, name)(*arguments)
        if status:
            self._runtime.cudaGetLastError()  # clears it, so that nobody else meets it
            reason = self._runtime.cudaGetErrorString(status).decode()
            raise MailboxError(f"{name} failed on {self._device} with error {status}: {reason}")
