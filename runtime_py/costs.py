"""Measures what steps of different sizes cost, on steps that change no state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .session import Session, make_outputs


class CostError(ValueError):
    """A cost table has nothing for a step of that size."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a draft step by requests, and of a target step by rows. A size between two measured ones costs as much
    as the larger, like a batch that is padded to a captured graph."""

    draft_seconds: Mapping[int, float]
    verify_seconds: Mapping[int, float]

    def steps_per_second(self, requests: int, rows: int) -> float:
        """SPS of a step of ``requests`` requests that verifies ``rows`` rows, anchors included.

        Raises:
            CostError: the step is larger than any that was measured.
        """
        return 1.0 / (_cost(self.draft_seconds, requests) + _cost(self.verify_seconds, rows))

    @classmethod
    def measure(
        cls,
        draft: Callable[[int], object],
        verify: Callable[[int], object],
        max_requests: int,
        max_rows: int,
        replays: int = 5,
    ) -> CostTable:
        """Time steps of growing sizes, the larger ones a fifth apart: the median of ``replays``, after one not
        counted."""

        def seconds(step: Callable[[int], object], size: int) -> float:
            taken = []
            for _ in range(replays + 1):
                started = time.perf_counter()
                step(size)
                taken.append(time.perf_counter() - started)
            return statistics.median(taken[1:])

        return cls(
            {n: seconds(draft, n) for n in _sizes(max_requests)}, {n: seconds(verify, n) for n in _sizes(max_rows)}
        )


def _cost(seconds: Mapping[int, float], size: int) -> float:
    if size in seconds:
        return seconds[size]
    if not (larger := [n for n in seconds if n >= size]):
        raise CostError(
            f"a step of {size} was not measured, the largest is {max(seconds)}; take the costs from profile_costs() of "
            "the decoder that runs it"
        )
    return seconds[min(larger)]


def _sizes(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(largest, max(sizes[-1] + 1, sizes[-1] * 6 // 5)))
    return sizes


@dataclass(frozen=True)
class IdleSteps:
    """Steps of a session on zeros that change nothing: rows that could enter a cache have no slot.

    They run where the caches are, and a call returns when its step has ended. A size is a number of rows, or with
    ``rows_per_request`` of requests that have as many rows each.
    """

    session: Session
    caches: Mapping[str, Tensor]
    rows_per_request: int = 1

    def __call__(self, size: int) -> None:
        sizes = {"R": size, "T": size * self.rows_per_request}
        inputs = dict(self.caches)
        device = next((cache.device for cache in self.caches.values()), torch.device("cpu"))
        for info in self.session.io.inputs:
            if info.name not in inputs and info.name != "mailbox":
                value = -1 if info.name.endswith("slots") and info.shape == ("T",) else 0
                shape = [sizes[d] if isinstance(d, str) else d for d in info.shape]
                inputs[info.name] = torch.full(shape, value, dtype=info.dtype, device=device)
        self.session.run(inputs, make_outputs(self.session, inputs, self.caches))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
