"""What a caller asks for, what it gets back, and a request's state in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor


class RequestError(ValueError):
    """A prompt or its sampling parameters can't be served by these engines."""


class FinishReason(str, Enum):
    STOP = "stop"
    """A stop token was produced; it is not part of the output."""
    LENGTH = "length"
    """``max_tokens`` were produced."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; field names as in vLLM and TensorRT-LLM."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy, the only value of this version."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}, expected at least 1")
        if self.temperature != 0:
            problems.append(f"temperature is {self.temperature}; this version decodes greedily, pass 0")
        if problems:
            raise RequestError("; ".join(problems))


@dataclass(frozen=True)
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class Statistics:
    """Counts and seconds of one :meth:`Decoder.generate`; a step is one request's share of a decode call."""

    steps: int = 0
    tokens: int = 0
    """Tokens that steps produced, the one of the prefill not counted."""
    proposed_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    target_calls: int = 0
    draft_calls: int = 0
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def record(self, proposed: int, accepted: int, produced: int) -> None:
        self.steps += 1
        self.tokens += produced
        for i in range(proposed):
            self.proposed_per_position[i] += 1
            self.accepted_per_position[i] += i < accepted


@dataclass
class Request:
    """A request that holds a cache slot.

    ``tokens`` are prompt and output; the last one is the anchor: produced, but not yet seen by the target.
    ``context`` are captured target rows that the draft has not inserted yet, with the position of the
    first.
    """

    index: int
    slot: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    context: Tensor | None = None
    context_start: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, produced: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Append tokens up to a stop token or the length limit; return those appended and the reason to
        finish. A stop token in the middle of accepted drafts cuts the rest off."""
        kept: list[int] = []
        for token in produced:
            if token in self.stop_ids:
                return kept, FinishReason.STOP
            self.tokens.append(token)
            kept.append(token)
            if len(self.output) == self.params.max_tokens:
                return kept, FinishReason.LENGTH
        return kept, None
