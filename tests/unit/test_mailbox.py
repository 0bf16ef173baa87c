"""The mailbox's setup and messages, with host memory and two threads in place of two GPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.plugins import mhc_all_reduce as layout
from dspark_trt.plugins.markov_sampling_sharded import MAX_REQUESTS, MAX_STEPS
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.mailbox import CudaMemory, Mailbox, MailboxError, region_bytes, slot_bytes

from tests.thread_ranks import outcomes

CPU = torch.device("cpu")
HIDDEN = 64
BLOCK_BYTES = 2 << 20
"""What cudaMalloc gives to one allocation alone."""


class Node:
    """The memory of a job's ranks by address, and what happened to it."""

    def __init__(self) -> None:
        self.allocations: dict[int, np.ndarray] = {}
        self.events: list[tuple[str, int]] = []


class FakeMemory:
    """Addresses are above 32 bits, and a mapped region has another address than its owner's."""

    def __init__(self, node: Node, rank: int, refuse: str = ""):
        self.node, self.rank, self.refuse = node, rank, refuse
        self.mapped: dict[int, int] = {}

    def _event(self, name: str, address: int) -> None:
        if name == self.refuse:
            raise MailboxError(f"{name} failed with error 101: invalid device ordinal")
        self.node.events.append((f"{name} {self.rank}", address))

    def allocate(self, size: int) -> int:
        address = 0x7F00_0000_0000 + (self.rank << 40) + 0xFFFF_FFF0
        self._event("allocate", address)
        self.node.allocations[address] = np.full(size, 0xAB, np.uint8)
        return address

    def free(self, address: int) -> None:
        self._event("free", address)
        del self.node.allocations[address]

    def write(self, address: int, data: np.ndarray) -> None:
        self._event("write", address)
        base = max(a for a in self.node.allocations if a <= address)
        raw = data.view(np.uint8)
        self.node.allocations[base][address - base : address - base + raw.size] = raw

    def read(self, address: int, size: int) -> bytes:
        base = max(a for a in self.node.allocations if a <= address)
        return self.node.allocations[base][address - base : address - base + size].tobytes()

    def export(self, address: int) -> bytes:
        self._event("export", address)
        return address.to_bytes(64, "little")

    def map(self, handle: bytes) -> int:
        owner = int.from_bytes(handle, "little")
        self._event("map", owner)
        address = owner + (self.rank + 1 << 56)
        self.mapped[address] = owner
        return address

    def unmap(self, address: int) -> None:
        self._event("unmap", self.mapped.pop(address))


def on_ranks(size: int, action: Callable[[Communicator, FakeMemory], Any], **refuse: str) -> tuple[Node, list[Any]]:
    """Run ``action`` on every rank; return what each returned, or the MailboxError that it raised."""
    node = Node()
    results = outcomes(
        size, lambda c: action(c, FakeMemory(node, c.rank, refuse.get(f"rank{c.rank}", ""))), timeout_s=20
    )
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, MailboxError):
            raise result
    return node, results


def make(communicator: Any, memory: Any, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN) -> Mailbox:
    return Mailbox.create(communicator, hidden, dtype, CPU, timeout_s=2.5, memory=memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_channel_holds_the_sentinel_of_its_dtype_and_words_are_zero(dtype: torch.dtype) -> None:
    """TP-3."""
    node, boxes = on_ranks(2, lambda c, m: make(c, m, dtype))
    bits = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    for rank, box in enumerate(boxes):
        region = next(v for a, v in node.allocations.items() if (a >> 40) & 1 == (0x7F + rank) & 1)
        assert region.size == region_bytes(2, HIDDEN, dtype)
        end = layout.MAILBOX_HEADER_BYTES + slot_bytes(2, HIDDEN, dtype)
        words = region[end:].view(np.int64)
        assert words.size == 2 * MAX_STEPS * MAX_REQUESTS * 2 and not words.any()
        slots = region[layout.MAILBOX_HEADER_BYTES : end].view(bits)
        assert slots.size == 3 * 2 * layout.MAILBOX_ROWS * HIDDEN
        assert (slots == 1 << (8 * dtype.itemsize - 1)).all()
        words = region[: layout.MAILBOX_HEADER_BYTES].view(np.int32)
        header = {name: int(words[i]) for name, i in layout.MAILBOX_WORDS.items()}
        assert header == {
            **{"rank": rank, "ranks": 2, "hidden": HIDDEN, "channel_bytes": dtype.itemsize, "timeout_ms": 2500},
            **{"generation": 0, "fault": 0, "arrived": 0, "sampling_generation": 0},
        }
        assert words.sum() == sum(header.values())
        box._own = 0


def test_addresses_start_with_the_own_region_and_go_round() -> None:
    _, tables = on_ranks(4, lambda c, m: (make(c, m), m))
    for rank, (box, memory) in enumerate(tables):
        assert box.tensor.shape == (4, 2) and box.tensor.dtype == torch.int32
        halves = box.tensor.numpy().view(np.uint32).astype(np.uint64)
        addresses = [int(low | high << np.uint64(32)) for low, high in halves]
        owners = [memory.mapped.get(a, a) for a in addresses]
        assert [((a >> 40) - 0x7F) % 4 for a in owners] == [(rank + i) % 4 for i in range(4)]
        assert addresses[0] not in memory.mapped
        box._own = 0


def test_regions_are_filled_before_any_handle_travels() -> None:
    """TP-7: a region filled later would erase what a peer already wrote."""
    node, boxes = on_ranks(2, make)
    kinds = [name.split()[0] for name, _ in node.events]
    assert max(i for i, k in enumerate(kinds) if k == "write") < min(i for i, k in enumerate(kinds) if k == "map")
    for rank in range(2):
        own = [k for k, (name, _) in zip(kinds, node.events, strict=True) if name.endswith(str(rank))]
        assert own.index("export") > max(i for i, k in enumerate(own) if k == "write")
        boxes[rank]._own = 0


@pytest.mark.parametrize("step", ["allocate", "write", "export", "map"])
def test_a_rank_that_fails_makes_all_ranks_raise_the_same(step: str) -> None:
    """TP-8, TP-11: nobody is left waiting in a collective, and nothing stays allocated or mapped."""
    node, results = on_ranks(2, make, rank1=step)
    assert all(isinstance(r, MailboxError) for r in results)
    assert str(results[0]) == str(results[1])
    assert f"rank 1: {step} failed with error 101" in str(results[0]) and "peer access" in str(results[0])
    mapped = [name for name, _ in node.events if name.startswith("map")]
    unmapped = [name for name, _ in node.events if name.startswith("unmap")]
    assert len(mapped) == len(unmapped)
    assert not node.allocations


def test_a_failure_while_giving_back_leaves_nobody_waiting() -> None:
    """TP-11: rank 1 can't map, and rank 0 then can't unmap what it has mapped."""

    def failing(communicator: Communicator, memory: Any) -> Any:
        if communicator.rank == 0:

            def unmap(address: int) -> None:
                raise MailboxError("unmap failed with error 101")

            memory.unmap = unmap
        return make(communicator, memory)

    _, results = on_ranks(2, failing, rank1="map")
    assert all(isinstance(r, MailboxError) for r in results)
    assert str(results[0]) == str(results[1])
    assert "rank 1: map failed" in str(results[0]) and "rank 0: unmap failed" in str(results[0])


def test_a_rank_without_a_cuda_runtime_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP-11: it is missed before anything is allocated, and no rank waits for the one that has none."""
    runtime = Runtime()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def library(name: str) -> Runtime:
        if threading.current_thread().name == "rank 1":
            raise OSError(f"{name}: cannot open shared object file")
        return runtime

    monkeypatch.setattr(ctypes, "CDLL", library)

    def made(communicator: Communicator) -> Mailbox:
        threading.current_thread().name = f"rank {communicator.rank}"
        return Mailbox.create(communicator, HIDDEN, torch.bfloat16, torch.device("cuda", 0))

    results = outcomes(2, made, timeout_s=20)
    assert all(isinstance(r, MailboxError) for r in results), results
    assert str(results[0]) == str(results[1])
    assert "rank 1: libcudart.so.13 is not found (" in str(results[0])
    assert "install torch together with its CUDA packages" in str(results[0])
    assert not runtime.blocks


def test_ranks_with_different_parameters_are_refused() -> None:
    """TP-5."""
    _, results = on_ranks(2, lambda c, m: make(c, m, hidden=HIDDEN * (c.rank + 1)))
    for result in results:
        assert isinstance(result, MailboxError)
        assert f"'hidden': {HIDDEN}" in str(result) and f"'hidden': {2 * HIDDEN}" in str(result)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.bfloat16), (3, torch.bfloat16), (2, torch.float64)])
def test_what_the_kernels_do_not_take_is_refused(size: int, dtype: torch.dtype) -> None:
    """TP-12."""
    _, results = on_ranks(size, lambda c, m: make(c, m, dtype))
    assert all(isinstance(r, MailboxError) and f"{size} ranks" in str(r) for r in results)


def test_close_frees_nothing_that_a_peer_still_maps() -> None:
    def cycle(communicator: Communicator, memory: FakeMemory) -> None:
        box = make(communicator, memory)
        box.close()
        box.close()

    node, _ = on_ranks(2, cycle)
    kinds = [name.split()[0] for name, _ in node.events]
    assert max(i for i, k in enumerate(kinds) if k == "unmap") < min(i for i, k in enumerate(kinds) if k == "free")
    assert kinds.count("free") == 2 and not node.allocations


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (layout.MAILBOX_SILENT_RANK + 1, "rank 0: rank 1 sent nothing for 2.5 s"),
        (layout.MAILBOX_MISFIT, "rank 0: an operation was called with other channels"),
    ],
)
def test_a_fault_that_a_kernel_noted_becomes_an_error(fault: int, message: str) -> None:
    """TP-11."""

    def provoke(communicator: Communicator, memory: FakeMemory) -> None:
        box = make(communicator, memory)
        try:
            box.check()
            memory.write(box._own + 4 * layout.MAILBOX_WORDS["fault"], np.array([fault], np.int32))
            with pytest.raises(MailboxError, match=message if communicator.rank == 0 else "rank 1"):
                box.check()
        finally:
            box.close()

    _, results = on_ranks(2, provoke)
    assert results == [None, None]


def test_sizes_beyond_32_bits_are_counted() -> None:
    """TP-6."""
    sampling = 2 * 8 * 64 * 8 * 8
    assert region_bytes(8, 131072, torch.float32) == 128 + 3 * 8 * 256 * 131072 * 4 + sampling > 2**31


class Runtime:
    """The CUDA runtime as a process loads it. An allocation that is no whole number of blocks lies somewhere in a
    block that others share, and a handle stands for the block, as on a device."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.sizes: list[int] = []
        self.cudaGetErrorString = lambda status: b"refused"

    def cudaMalloc(self, found: Any, size: Any) -> int:  # noqa: N802
        self.sizes.append(size.value)
        memory = ctypes.create_string_buffer(size.value + 3 * BLOCK_BYTES)
        base = -(-ctypes.addressof(memory) // BLOCK_BYTES) * BLOCK_BYTES
        self.blocks[base] = memory
        found._obj.value = base + (512 if size.value % BLOCK_BYTES else 0)
        return 0

    def cudaFree(self, address: Any) -> int:  # noqa: N802
        del self.blocks[address.value]
        return 0

    def cudaMemcpy(self, target: Any, source: Any, size: Any, kind: int) -> int:  # noqa: N802
        ctypes.memmove(target, source, size.value)
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, address: Any) -> int:  # noqa: N802
        block = max(base for base in self.blocks if base <= address.value)
        ctypes.memmove(handle, block.to_bytes(64, "little"), 64)
        return 0

    def cudaIpcOpenMemHandle(self, found: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        found._obj.value = int.from_bytes(bytes(handle), "little")
        return 0

    def cudaIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        return 0


def test_a_region_is_an_allocation_of_its_own_whatever_torchs_allocator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP-9: with expandable segments torch's memory has no handle, and a part of a block would be mapped at the
    block's start. What a peer maps is the region itself: its header names the owner."""
    runtime = Runtime()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)

    def owners(communicator: Communicator) -> list[int]:
        memory = CudaMemory(torch.device("cuda", 0))
        box = Mailbox.create(communicator, HIDDEN, torch.bfloat16, CPU, memory=memory)
        addresses = box.tensor.numpy().view(np.uint64).flatten().tolist()
        found = [memory.read(a + 4 * layout.MAILBOX_WORDS["rank"], 4)[0] for a in addresses]
        box.close()
        return found

    assert region_bytes(2, HIDDEN, torch.bfloat16) % BLOCK_BYTES
    assert outcomes(2, owners, timeout_s=20) == [[0, 1], [1, 0]]
    assert len(runtime.sizes) == 2 and not runtime.blocks


def test_peer_memory_without_a_gpu_is_refused() -> None:
    with pytest.raises(MailboxError, match="needs a GPU"):
        CudaMemory(CPU)
