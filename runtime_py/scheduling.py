"""Decides how many drafts of each request are verified (spec section 6.3).

Every verified row costs time, and a draft that will not be kept is not worth it. A draft's survival is the
product of the acceptance probabilities up to it; a step that verifies B rows is expected to emit tau tokens,
one per request plus the survival of the drafts among the rows, and runs SPS(B) times per second.

A length must not depend on the drafts that it decides about. The confidence of slot j depends on the drafts before j,
so looking at slot j and then leaving out an *earlier* draft makes that draft's fate depend on its own value, and the
output is biased. Two schedules avoid that:

* :class:`EarlyStop` (Algorithm 1) admits drafts in descending survival and stops at the first that does not
  raise tau * SPS, equality included. It keeps every draft that it looked at, except that one;
* :class:`Lookahead` chooses the number of drafts from the survivals of two steps before, which do not depend on the
  current drafts, by trying all numbers; then it admits that many in descending survival. Costs may be uneven, and the
  host knows the number early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .acceptance import Acceptance, ScheduleError
from .costs import CostTable


class Scheduler(Protocol):
    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        """Drafts to verify of each request, at most its limit; ``confidence`` [R, N] before the sigmoid."""
        ...

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """Called after each step with the drafts verified and kept."""
        ...


class FullLength:
    """Everything that was drafted."""

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        return list(limits)

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class Threshold:
    """The drafts before the first that is less likely than ``minimum`` to be kept."""

    acceptance: Acceptance
    minimum: float

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= 1:
            raise ScheduleError(f"a confidence threshold of {self.minimum}, expected a probability")

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        likely = self.acceptance.probabilities(confidence) >= self.minimum
        return [min(n, limit) for n, limit in zip(likely.long().cumprod(1).sum(1).tolist(), limits, strict=True)]

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        self.acceptance.record(lengths, accepted)


class EarlyStop:
    """Algorithm 1."""

    def __init__(self, acceptance: Acceptance, costs: CostTable):
        self._acceptance, self._costs = acceptance, costs

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        survival = survivals(self._acceptance.probabilities(confidence), limits)
        requests = rows = len(survival)
        expected, lengths = float(requests), [0] * requests
        best = expected * self._costs.steps_per_second(requests, rows)
        for chance, slot, request in descending(survival):
            rows, expected = rows + 1, expected + chance
            value = expected * self._costs.steps_per_second(requests, rows)
            if value <= best:
                break
            best, lengths[request] = value, slot + 1
        return lengths

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.record(lengths, accepted)


class Lookahead:
    """The number of drafts from two steps before, spent by the current confidences."""

    def __init__(self, acceptance: Acceptance, costs: CostTable):
        self._acceptance, self._costs = acceptance, costs
        self._capacities: deque[int] = deque(maxlen=2)

    def lengths(self, confidence: Tensor, limits: Sequence[int]) -> list[int]:
        survival = survivals(self._acceptance.probabilities(confidence), limits)
        # The first two steps verify everything.
        known = len(self._capacities) == 2
        capacity = self._capacities[0] if known else survival.numel()
        self._capacities.append(best_capacity(survival, self._costs))
        return spend(survival, capacity)

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.record(lengths, accepted)


def survivals(probabilities: Tensor, limits: Sequence[int]) -> Tensor:
    """The running products [R, N], zero after each request's limit."""
    slots = torch.arange(probabilities.shape[1])
    return probabilities.cumprod(1) * (slots < torch.tensor(limits).unsqueeze(1))


def descending(survival: Tensor) -> list[tuple[float, int, int]]:
    """(survival, slot, request) of all drafts with a survival above zero, the likeliest first; of equals the
    earlier slot, so that a request's drafts always come in order."""
    pairs = [(a, j, r) for r, row in enumerate(survival.tolist()) for j, a in enumerate(row) if a > 0]
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))


def best_capacity(survival: Tensor, costs: CostTable) -> int:
    """The number of drafts for which tau * SPS is largest, of equals the smallest."""
    requests, expected = len(survival), float(len(survival))
    values = [expected * costs.steps_per_second(requests, requests)]
    for count, (chance, _, _) in enumerate(descending(survival), 1):
        expected += chance
        values.append(expected * costs.steps_per_second(requests, requests + count))
    return values.index(max(values))


def spend(survival: Tensor, capacity: int) -> list[int]:
    """Lengths that admit the ``capacity`` likeliest drafts."""
    lengths = [0] * len(survival)
    for _, slot, request in descending(survival)[:capacity]:
        lengths[request] = slot + 1
    return lengths
