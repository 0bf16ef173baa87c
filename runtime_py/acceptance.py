"""The probability that each draft is kept, given that those before it are: from the confidence head or past steps.

The head's logits are divided by one temperature per position, fitted in sequence (sequential temperature
scaling): position i's temperature is the one that calibrates the product over positions 1 .. i best, with the earlier
temperatures fixed. For drafts without a confidence head, acceptance by position is estimated from past steps. A
scheduler uses one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

TEMPERATURES = torch.tensor([2 ** (i / 8) for i in sorted(range(-24, 25), key=abs)], dtype=torch.float64)
"""From 1 outwards, so that of equally good ones the mildest is taken."""
LOGIT_LIMIT = 8.0
BINS = 16


class ScheduleError(ValueError):
    """A value that a schedule depends on is out of range, or does not fit the draft."""


class Acceptance(Protocol):
    def probabilities(self, confidence: Tensor) -> Tensor:
        """[R, N] float64, each given that the drafts before are kept; ``confidence`` [R, N] before the sigmoid."""
        ...

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step that verified ``lengths`` drafts and kept ``accepted``."""
        ...


@dataclass(frozen=True)
class HeadAcceptance:
    """The confidence head's probabilities, calibrated by one temperature per position; without temperatures, as they
    are."""

    temperatures: Sequence[float] = ()

    def __post_init__(self) -> None:
        if wrong := [t for t in self.temperatures if not 0 < t < math.inf]:
            raise ScheduleError(
                f"confidence temperatures {wrong}, expected numbers above 0; 1 leaves a position as it is"
            )

    def probabilities(self, confidence: Tensor) -> Tensor:
        logits = confidence.double()
        if self.temperatures:
            if len(self.temperatures) != logits.shape[1]:
                raise ScheduleError(
                    f"{len(self.temperatures)} confidence temperatures for a block of {logits.shape[1]} drafts; "
                    "give one for each position, or none"
                )
            logits = _limited(logits) / torch.tensor(self.temperatures, dtype=torch.float64)
        return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sigmoid()

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        pass

    @classmethod
    def calibrated(cls, confidence: Tensor, lengths: Tensor, accepted: Tensor) -> HeadAcceptance:
        """The head with temperatures fitted to past steps.

        Args:
            confidence: [steps, N] before the sigmoid; lengths, accepted: [steps], verified and kept drafts.
        """
        logits, fitted = _limited(confidence.double()), []
        survival = torch.ones(len(logits), dtype=torch.float64)
        for i, column in enumerate(logits.unbind(1)):
            tried, kept = lengths > i, (accepted > i).double()
            candidates = survival * torch.sigmoid(column / TEMPERATURES.unsqueeze(1))
            errors = torch.stack([calibration_error(c[tried], kept[tried]) for c in candidates])
            best = int(errors.argmin())
            fitted.append(float(TEMPERATURES[best]))
            survival = candidates[best]
        return cls(fitted)


def calibration_error(predicted: Tensor, outcome: Tensor) -> Tensor:
    """The expected calibration error of probabilities [n] for outcomes [n] in {0, 1}, over equal bins."""
    index = (predicted * BINS).long().clamp_max(BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, index, predicted - outcome)
    return gaps.abs().sum() / max(len(predicted), 1)


class OnlineAcceptance:
    """For each position, the share of tried drafts that were kept so far; older steps count less.

    The prior counts as ``prior`` tried drafts and does not fade. It is optimistic, so that a position that is no longer
    verified drifts back to where it is tried again.
    """

    def __init__(self, block: int, *, decay: float = 0.999, prior: float = 64.0, prior_rate: float = 1.0):
        self._decay, self._prior, self._prior_rate = decay, prior, prior_rate
        self._tried, self._kept = torch.zeros(2, block, dtype=torch.float64)

    def probabilities(self, confidence: Tensor) -> Tensor:
        rate = (self._kept + self._prior * self._prior_rate) / (self._tried + self._prior)
        return rate.expand(confidence.shape)

    def record(self, lengths: Sequence[int], accepted: Sequence[int]) -> None:
        index = torch.arange(len(self._tried))
        verified, kept = torch.tensor(lengths).unsqueeze(1), torch.tensor(accepted).unsqueeze(1)
        # Drafts after the first that was not kept teach nothing.
        tried = (index < verified) & (index <= kept)
        self._tried = self._decay * self._tried + tried.sum(0)
        self._kept = self._decay * self._kept + (tried & (index < kept)).sum(0)


def _limited(logits: Tensor) -> Tensor:
    return logits.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
