"""What the tests and the benchmark of the decode loop on a GPU count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.runtime_py.requests import SamplingParams, Statistics

from tests.gpu import decode_runs
from tests.gpu.decode_runs import Memory, late_growth, memory_over_steps, waits_of_steps


class SomeSteps:
    """In place of a decoder: a token per step."""

    def __init__(self, lost: int = 0):
        self.ran, self.lost = 0, lost

    def generate(self, prompts: Any, params: SamplingParams) -> tuple[list[Any], Statistics]:
        self.ran = params.max_tokens - self.lost
        return [], Statistics(device_steps=self.ran)


def test_memory_is_sampled_at_a_stride_and_judged_in_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills up at first is no leak, a hundred bytes per step are one."""
    monkeypatch.setattr(Memory, "now", lambda steps: Memory(steps, 7, 4096, min(steps, 900) * 10_000 + 100 * steps))
    samples = memory_over_steps(SomeSteps(), [], SamplingParams(max_tokens=300), steps=3000, every=500)
    assert [sample.steps for sample in samples] == [300, 600, 1200, 1500, 2100, 2700, 3000]
    assert late_growth(samples) == Memory(1500, 0, 0, 150_000)


def test_a_decoder_without_steps_of_its_own_is_not_taken_for_one_that_leaks_nothing() -> None:
    with pytest.raises(AssertionError, match="no step ran on the device"):
        memory_over_steps(SomeSteps(10), [], SamplingParams(max_tokens=10), steps=100, every=50)


def events_of(steps: int, waits: int) -> list[dict[str, Any]]:
    """A step is a launch of 10 us, 4 us of nothing, a launch of 10 us and 30 us of nothing, and ``waits`` events."""
    found: list[dict[str, Any]] = [{"cat": "cuda_runtime", "name": "cudaMemcpy"}] * 3
    for i in range(2 * steps):
        at = 27 * (i - i % 2) + 14 * (i % 2)
        args = {"correlation": i}
        found.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": at, "args": args})
        found.append({"cat": "kernel", "name": "any", "ts": at, "dur": 10, "args": args})
    return found + [{"cat": "cuda_runtime", "name": "cudaEventSynchronize"}] * (steps * waits)


def test_waits_are_those_of_the_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the prefill, in both runs, are left out; gaps are between target and draft, not between steps."""
    decoder = SomeSteps()

    def profile(work: Callable[[], object], directory: Path) -> list[dict[str, Any]]:
        work()
        return events_of(decoder.ran, waits=2)

    monkeypatch.setattr(decode_runs, "profile", profile)
    waits = waits_of_steps(decoder, [], tmp_path, (30, 90))
    assert waits.steps == 60 and waits.calls == {"cudaEventSynchronize": 120}
    assert waits.host_gaps == [4.0] * 120


def test_a_profile_that_lacks_replays_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(work: Callable[[], object], directory: Path) -> list[dict[str, Any]]:
        work()
        return events_of(20, waits=1)

    monkeypatch.setattr(decode_runs, "profile", profile)
    with pytest.raises(AssertionError, match="20 replays of 30 steps"):
        waits_of_steps(SomeSteps(), [], tmp_path, (30, 90))
