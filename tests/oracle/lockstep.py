"""Ranks as threads: each runs its shard, and a gather returns when all have given their part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.runtime_py.communicator import Communicator

from tests.thread_ranks import on_ranks

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """``work(rank)`` of every rank, run together inside collective scopes; the first error is raised."""

    def rank_main(communicator: Communicator) -> T:
        with collective_scope(communicator.all_gather), torch.no_grad():
            return work(communicator.rank)

    return on_ranks(size, rank_main)
