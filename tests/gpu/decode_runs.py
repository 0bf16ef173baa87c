"""What the tests and the benchmark of the decode loop measure alike: tokens with the caches behind them, memory over
many steps, and which calls of the host wait for the device."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams, Statistics
from torch import Tensor

from tests.gpu.timeline import idle_inside, profile, steps_of, waiting_calls


def decode(
    engines: Path, prompts: Sequence[Sequence[int]], params: Any, *, replayed: bool = True, **options: Any
) -> tuple[list[list[int]], Statistics, list[Tensor]]:
    """Tokens, statistics, and the caches as the run left them."""
    with Decoder.from_dir(engines, device="cuda", **options) as decoder:
        if not replayed:
            enqueue(decoder)
        done, stats = decoder.generate(prompts, params)
        return [completion.token_ids for completion in done], stats, caches(decoder)


def enqueue(decoder: Decoder) -> None:
    """From here on steps are enqueued call by call, of the request counts that were captured. Of others, as without
    any capture, they could differ by rounding: a matrix product sums in an order that depends on its number of rows."""
    assert decoder.interleaver
    decoder.interleaver._pool = None
    decoder.interleaver._parts.clear()


def caches(decoder: Decoder) -> list[Tensor]:
    """Copies of all rings of target and draft."""
    return [ring.clone() for rings in decoder._host.rings for ring in rings.values()]


def same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@dataclass(frozen=True)
class Memory:
    """Bytes in use after so many steps."""

    steps: int
    allocated: int
    """By torch, on the device."""
    device: int
    """Of the whole device, which must have no other user that starts meanwhile."""
    host: int

    @classmethod
    def now(cls, steps: int) -> Memory:
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return cls(steps, torch.cuda.memory_allocated(), total - free, psutil.Process().memory_info().rss)


def memory_over_steps(
    decoder: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams, steps: int, every: int
) -> list[Memory]:
    """Memory after a first run, then after each ``every`` steps until there were ``steps``."""
    found: list[Memory] = []
    done = 0
    while done < steps:
        counted = decoder.generate(prompts, params)[1].device_steps
        assert counted > 0, "no step ran on the device"
        done += counted
        if done >= every * len(found):
            found.append(Memory.now(done))
    return found


def late_growth(samples: Sequence[Memory]) -> Memory:
    """By how much memory grew in the second half of the steps; the first may still fill pools and buffers."""
    first = next(sample for sample in samples if 2 * sample.steps >= samples[-1].steps)
    last = samples[-1]
    return Memory(*(getattr(last, name) - getattr(first, name) for name in ("steps", "allocated", "device", "host")))


@dataclass(frozen=True)
class Waits:
    """What a long run did more than a short one, so that prefill and the end of a run hide nothing."""

    steps: int
    calls: Counter[str]
    """Calls that can wait for the device, by name."""
    host_gaps: list[float]
    """Microseconds between the target's replay and the draft's, of each step of both runs, sorted."""


def waits_of_steps(
    decoder: Decoder, prompts: Sequence[Sequence[int]], directory: Path, lengths: tuple[int, int] = (300, 900)
) -> Waits:
    """Profiles a run of each length; ``directory`` is for the profiles. The decoder must replay its steps."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in lengths]
    decoder.generate(prompts, params[0])
    ran: list[Statistics] = []
    calls: list[Counter[str]] = []
    gaps: list[float] = []
    for each in params:
        events = profile(lambda each=each: ran.append(decoder.generate(prompts, each)[1]), directory)  # type: ignore[misc]
        steps = steps_of(events)
        assert len(steps) >= ran[-1].device_steps, f"{len(steps)} replays of {ran[-1].device_steps} steps"
        calls.append(waiting_calls(events))
        gaps += map(idle_inside, steps)
    return Waits(ran[1].device_steps - ran[0].device_steps, calls[1] - calls[0], sorted(gaps))
