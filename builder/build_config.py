"""What engines can do: the configuration of a build, what refuses it, and its JSON in an engine directory's header."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..plugins.markov_sampling_sharded import MAX_REQUESTS, MAX_STEPS
from ..plugins.tensorrt_api import EngineOptions, TensorRT
from .config import ConfigError, DraftConfig, Numerics, check_draft_length
from .json_values import field_types, read_value

Kind = Literal["draft", "target"]
VOCABULARY_SPLIT_FROM = 1
"""Requests from which sharing the sampling by vocabulary is faster than doing all of it on every rank: with the head's
product, two H200s take 214 us against 382 at one request, 321 against 596 at 16 (tests/benchmarks/markov_loops.py)."""
REQUEST_SPLIT_FROM = 0
"""Requests from which sharing it by requests is faster still; 0 is never, as measured up to 64 requests."""


DEFAULT_INPUT_LEN = 1024


class Lowering(str, enum.Enum):
    """``plugin``: operations are plugin layers; ``native``: they are spelled in TensorRT's own layers."""

    PLUGIN = "plugin"
    NATIVE = "native"


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What the engines can do."""

    lowering: Lowering = Lowering.PLUGIN
    """native needs no plugin library, and dequantized numerics."""
    numerics: Numerics = Numerics.RELEASED
    """released quantises activations as the released model does; dequantized leaves them alone."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Activation type; released numerics are defined in bfloat16 only."""
    max_batch_size: int = 8
    """Requests in flight = cache slots."""
    max_input_len: int = DEFAULT_INPUT_LEN
    """Rows of one context call, all requests together."""
    max_seq_len: int = 4096
    """Positions a request may reach."""
    num_draft_tokens: int | None = None
    """Must be the draft's block size, and is that when left out."""
    sampling: bool = False
    """Draft with temperature and seeds, and with draft_logits as output; without, greedy drafts."""
    float64_noise: bool = False
    """Draw a sampling draft's noise in float64, from 32 bits per token instead of 23; slower."""
    vocabulary_split_from: int = VOCABULARY_SPLIT_FROM
    """Requests from which ranks in torch share the sampling of greedy drafts by vocabulary; 0 is never."""
    request_split_from: int = REQUEST_SPLIT_FROM
    """Requests from which they share it by requests instead; 0 is never."""
    options: EngineOptions = field(default_factory=EngineOptions)

    def checked(self, draft: DraftConfig) -> BuildConfig:
        """This configuration with the draft length filled in.

        Raises:
            ConfigError: with every value that is out of range or contradicts another.
        """
        block = draft.block_size
        problems = []
        if self.lowering is Lowering.NATIVE and self.numerics is Numerics.RELEASED:
            problems.append("the native lowering computes dequantized numerics; add --numerics dequantized")
        if self.lowering is Lowering.NATIVE and self.sampling:
            problems.append(
                "TensorRT has no bitwise operators for the native lowering's noise; use the plugin lowering"
            )
        if self.numerics is Numerics.RELEASED and self.dtype != "bfloat16":
            problems.append(f"released numerics are bfloat16, dtype is {self.dtype}; add --numerics dequantized")
        if self.float64_noise and not self.sampling:
            problems.append("float64_noise is of sampling drafts; add --sampling, or leave it out")
        for name in ("vocabulary_split_from", "request_split_from"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}, expected a number of requests, or 0 for never")
        if not 1 <= self.max_batch_size <= MAX_REQUESTS:
            problems.append(
                f"max_batch_size is {self.max_batch_size}, expected 1..{MAX_REQUESTS}: sampling takes so many"
            )
        if block > MAX_STEPS:
            problems.append(
                f"the draft's block has {block} tokens, sampling takes {MAX_STEPS}; there is no engine for it"
            )
        most = max(self.max_batch_size * self.max_seq_len, DEFAULT_INPUT_LEN)
        if not block + 1 <= self.max_input_len <= most:
            problems.append(
                f"max_input_len is {self.max_input_len}, expected {block + 1}, a step of one request, to {most}, more "
                "than which no call can have"
            )
        if not block + 1 < self.max_seq_len <= draft.max_position_embeddings:
            problems.append(
                f"max_seq_len is {self.max_seq_len}, expected {block + 2}..{draft.max_position_embeddings}, "
                "the positions the model was made for"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        if self.num_draft_tokens is not None:
            check_draft_length(draft, self.num_draft_tokens)
        return dataclasses.replace(self, num_draft_tokens=block)


def check_engine_draft(draft: DraftConfig) -> None:
    """Raise :class:`ConfigError` if only the torch session has what ``draft`` samples with."""
    if draft.markov_head != "vanilla" or draft.transforms_logits:
        raise ConfigError(
            f"the draft has a {draft.markov_head} Markov head, logit scale {draft.logit_scale} and cap "
            f"{draft.logit_softcap}; engines have vanilla heads without scale and cap, run it with torch sessions"
        )


def check_engine_options(api: TensorRT, build: BuildConfig) -> None:
    """Raise :class:`ConfigError` if ``api`` lacks the activation type or an option; needs no exported model."""
    if build.dtype == "bfloat16" and api.is_8:
        raise ConfigError(
            f"{api} was asked for {build.numerics.value} numerics in {build.dtype}, and TensorRT 8.x carries float32, "
            "float16 and int32 only; pass --numerics dequantized --dtype float32 (or float16), or build with "
            "TensorRT 10 and up"
        )
    options = build.options
    if problem := api.option_problem(options):
        raise ConfigError(problem)
    if options.input_timing_cache and not options.input_timing_cache.is_file():
        raise ConfigError(f"--input-timing-cache {options.input_timing_cache}: not found; leave it out to start anew")


def to_dict(build: BuildConfig) -> dict[str, Any]:
    """A JSON-ready copy without ``options``, which the runtime does not need."""
    values = {k: v for k, v in dataclasses.asdict(build).items() if k != "options"}
    return {k: v.value if isinstance(v, enum.Enum) else v for k, v in values.items()}


def from_dict(values: Any) -> BuildConfig:
    """Rebuild what :func:`to_dict` wrote; a key or a value's type that it would not write raises ConfigError."""
    problems: list[str] = []
    found = read_value(field_types(BuildConfig, without=("options",)), values, "build", problems)
    if problems:
        raise ConfigError("; ".join(problems))
    return BuildConfig(**found)


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever their order and spacing in a file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
