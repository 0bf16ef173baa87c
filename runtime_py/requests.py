"""What a caller asks for, what it gets back, and a request's state in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any

from torch import Tensor


class RequestError(ValueError):
    """A prompt or its sampling parameters can't be served by these engines."""


def is_integer(value: object) -> bool:
    """Whether ``value`` is an int or one of NumPy's integers; a bool is neither."""
    return isinstance(value, Integral) and not isinstance(value, bool)


class FinishReason(str, Enum):
    STOP = "stop"
    """A stop token was produced, which is not part of the output, or a stop string, whose tokens are."""
    LENGTH = "length"
    """``max_tokens`` were produced."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names and meanings as in vLLM and TensorRT-LLM."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this."""
    min_p: float = 0.0
    """Keep tokens at least this likely compared with the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 makes what prompt and output hold less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token is in the output."""
    seed: int | None = None
    """With a seed a request's tokens depend on nothing but its prompt; without, every call draws a new one."""
    num_draft_tokens: int | None = None
    """Verify at most this many drafts per step; None leaves it to the draft's block."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, beside the model's own end token."""
    stop: Sequence[str] = ()
    """Strings that end the output; they need the tokenizer."""
    ignore_eos: bool = False
    """Go on after the model's own end token, which is part of the output then."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def restricts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def __post_init__(self) -> None:
        self._check_types()
        ranges = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "a number from 0 (greedy)"),
            "top_k": (self.top_k >= -1, "a count, or 0 or -1 for all tokens"),
            "top_p": (0 < self.top_p <= 1, "a probability above 0"),
            "min_p": (0 <= self.min_p <= 1, "a ratio from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a factor above 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "64 bits"),
            "num_draft_tokens": (self.num_draft_tokens is None or self.num_draft_tokens >= 0, "0 or more"),
        }
        problems = [
            f"{k} is {getattr(self, k)!r}, expected {wanted}" for k, (right, wanted) in ranges.items() if not right
        ]
        if self.greedy and self.restricts:
            problems.append("temperature is 0, which is greedy: top_k, top_p and min_p change nothing; leave them out")
        if problems:
            raise RequestError("; ".join(problems))

    def _check_types(self) -> None:
        """Refuse values of other types; NumPy's integers become ints."""
        problems = []
        for name, value in vars(self).items():
            right, wanted = _TYPES.get(name, _NUMBER)
            if not right(value):
                problems.append(f"{name} is {value!r}, expected {wanted}")
            elif is_integer(value) and name in _TYPES:
                object.__setattr__(self, name, int(value))
            elif name == "stop_token_ids":
                object.__setattr__(self, name, tuple(map(int, value)))
        if problems:
            raise RequestError("; ".join(problems))


def _listed(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, Collection) and not isinstance(values, str) and all(map(right, values))


_INTEGER = (is_integer, "an integer")
_OPTIONAL_INTEGER = (lambda value: value is None or is_integer(value), "an integer, or None")
_NUMBER = (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number")
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": _INTEGER,
    "top_k": _INTEGER,
    "seed": _OPTIONAL_INTEGER,
    "num_draft_tokens": _OPTIONAL_INTEGER,
    "stop_token_ids": (_listed(is_integer), "a list of integers"),
    "stop": (_listed(lambda text: isinstance(text, str) and text != ""), "a list of strings that are not empty"),
    "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
}
"""What the parameters have to be; those that are not listed are numbers."""


@dataclass(frozen=True)
class Completion:
    """What one prompt was completed with."""

    prompt_ids: list[int]
    """The prompt, as it was passed in."""
    token_ids: list[int]
    """The output, without the prompt; at most ``max_tokens``."""
    finish_reason: FinishReason
    text: str | None = None
    """The output up to a stop string; None without a tokenizer."""


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
    decode_calls: int = 0
    """Steps of the whole batch, whoever decided them; prefills and drafts on entering are none."""
    device_steps: int = 0
    """Decode calls that ran without the host's decisions."""
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    gap_seconds: float = 0.0
    """In which the device waited for the host between two steps of its own."""
    total_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def add_seconds(self, phase: str, seconds: float) -> None:
        """``phase`` is target, verify, draft or gap."""
        name = f"{phase}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def record(self, proposed: int, accepted: int, produced: int) -> None:
        """Count one request's share of a decode call.

        Args:
            proposed: drafts that were verified, at most the length of ``proposed_per_position``.
            accepted: how many of them were kept, counted even if the output ended before the last one.
            produced: tokens that were added to the output, at most ``accepted`` + 1.
        """
        self.steps += 1
        self.tokens += produced
        for i in range(proposed):
            self.proposed_per_position[i] += 1
            self.accepted_per_position[i] += i < accepted


_UNSURE_CHARACTERS = 8
"""How many leading characters may differ when only the end of an output is decoded: bytes of a split character, or a
leading space that the tokenizer strips."""


@dataclass(eq=False)
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
    seed: int = 0
    detokenize: Callable[[Sequence[int]], str] | None = None
    context: Tensor | None = None
    context_start: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def text(self) -> str | None:
        """The output up to the first stop string."""
        if self.detokenize is None:
            return None
        text = self.detokenize(self.output)
        return text[: min((text.index(stop) for stop in self.params.stop if stop in text), default=len(text))]

    def extend(self, produced: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Append tokens up to a stop token, a stop string or the length limit; return those appended and the
        reason to finish. A stop in the middle of accepted drafts cuts the rest off."""
        kept: list[int] = []
        for token in produced:
            if token in self.stop_ids:
                return kept, FinishReason.STOP
            self.tokens.append(token)
            kept.append(token)
            if self._ends_stop_string():
                return kept, FinishReason.STOP
            if self.output_length >= self.params.max_tokens:
                return kept, FinishReason.LENGTH
        return kept, None

    def _ends_stop_string(self) -> bool:
        """Whether the output holds a stop string, given that it held none before its last token.

        Such a string reaches into the last token's text, so it is enough to decode the last few tokens, however long
        the output is. Only if their text holds one is the whole output decoded, because tokens may read differently at
        the start of a text.
        """
        stops, detokenize = self.params.stop, self.detokenize
        if not stops or detokenize is None:
            return False
        reach = max(map(len, stops)) + _UNSURE_CHARACTERS
        count = reach + 1
        while count < self.output_length and len(detokenize(self.tokens[-count:-1])) < reach:
            count *= 2

        def found(text: str) -> bool:
            return any(stop in text for stop in stops)

        if count < self.output_length and not found(detokenize(self.tokens[-count:])):
            return False
        return found(detokenize(self.output))
