"""Ranks as threads: each runs its shard, and a gather returns when all have given their part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from dspark_trt.plugins.collective import collective_scope
from torch import Tensor

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """``work(rank)`` of every rank, run together inside collective scopes; the first error is raised."""
    parts: dict[int, Tensor] = {}
    results: dict[int, T] = {}
    errors: list[Exception] = []
    barrier = threading.Barrier(size, timeout=60)

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)

        def all_gather(tensor: Tensor) -> Tensor:
            parts[rank] = tensor
            barrier.wait()
            gathered = torch.stack([parts[r] for r in range(size)])
            barrier.wait()  # nobody overwrites a part that another has yet to read
            return gathered

        try:
            with collective_scope(all_gather), torch.no_grad():
                results[rank] = work(rank)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
