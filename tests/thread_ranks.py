"""Ranks of a job as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from torch import Tensor

T = TypeVar("T")


class ThreadRank:
    """The communicator of one such rank; tensors and objects are handed over as they are."""

    def __init__(self, rank: int, size: int, parts: dict[int, Any], barrier: threading.Barrier):
        self.rank, self.size, self._parts, self._barrier = rank, size, parts, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self._parts[self.rank] = value
        self._barrier.wait()
        gathered = [self._parts[r] for r in range(self.size)]
        self._barrier.wait()  # nobody overwrites a part that another has yet to read
        return gathered

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.all_gather_object(tensor))

    def broadcast(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def barrier(self) -> None:
        self._barrier.wait()

    def abort(self, code: int) -> None:
        self._barrier.abort()


def outcomes(size: int, work: Callable[[Communicator], T], timeout_s: float = 120) -> list[T | Exception]:
    """``work(communicator)`` of every rank, or what it raised."""
    parts: dict[int, Any] = {}
    barrier = threading.Barrier(size, timeout=timeout_s)
    results: dict[int, T | Exception] = {}

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(ThreadRank(rank, size, parts, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """``work(communicator)`` of every rank; a rank that fails ends the others, and its error is raised."""
    if size == 1:
        return [work(SingleProcess())]

    def guarded(communicator: Communicator) -> T:
        try:
            return work(communicator)
        except Exception:
            communicator.abort(1)
            raise

    results = outcomes(size, guarded)
    errors = [r for r in results if isinstance(r, Exception)]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results  # type: ignore[return-value]
