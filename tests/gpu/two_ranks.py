"""Two ranks as processes, each with a GPU of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dspark_trt.runtime_py.mailbox import Mailbox, MailboxError

RANKS = 2
Report = Any


class StoreCommunicator:
    """What a mailbox and NCCL ask of a communicator, through a store that the parent process keeps."""

    def __init__(self, rank: int, port: int):
        self._store, self._turn = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)), 0
        self.rank, self.size = rank, RANKS

    def all_gather_object(self, value: Any) -> list[Any]:
        self._turn += 1
        self._store.set(f"{self._turn} {self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{self._turn} {rank}")) for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def barrier(self) -> None:
        self.all_gather_object(None)


def _run_rank(work: Callable[..., Report], rank: int, port: int, seed: int, reports: Any) -> None:
    try:
        torch.cuda.set_device(rank)
        reports.put((rank, work(StoreCommunicator(rank, port), seed), ""))
    except BaseException:
        reports.put((rank, None, traceback.format_exc()))
        raise


def run_ranks(work: Callable[..., Report], seed: int, timeout_s: float, survivors: int = RANKS) -> dict[int, Report]:
    """``work(communicator, seed)`` of each rank that lives; fails with the traceback of one that raises."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    processes = [context.Process(target=_run_rank, args=(work, r, store.port, seed, reports)) for r in range(RANKS)]
    for process in processes:
        process.start()
    results: dict[int, Report] = {}
    try:
        deadline = time.monotonic() + timeout_s
        while len(results) < survivors:
            try:
                rank, result, error = reports.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"after {timeout_s} s only ranks {sorted(results)} had reported")
            assert not error, f"rank {rank}:\n{error}"
            results[rank] = result
        for rank in results:
            processes[rank].join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return results


def lose_a_peer(communicator: StoreCommunicator, box: Mailbox, launches: Sequence[Callable[[], None]]) -> Report:
    """Rank 1 is killed; what rank 0 then hears when it enqueues ``launches``, and in how many seconds."""
    communicator.barrier()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        box.check()
        message = ""
    except MailboxError as error:
        message = str(error)
    except RuntimeError as error:
        # A driver may take the mapping away with the process that owned it.
        message = f"CUDA: {error}"
    box._own = 0  # close() would wait for the dead
    return message, time.monotonic() - start


def check_survivor(work: Callable[..., Report], seed: int) -> None:
    """Of ``work``, which ends in :func:`lose_a_peer` with a timeout of 1.5 s: rank 0 hears of it, and soon."""
    message, seconds = run_ranks(work, seed, 90, survivors=1)[0]
    print(message)
    assert "rank 0: rank 1 sent nothing for 1.5 s" in message or message.startswith("CUDA: ")
    assert seconds < 6
