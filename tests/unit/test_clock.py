"""Times of phases: intervals between marks that have passed, and nothing across a pause."""

from __future__ import annotations

import pytest
from dspark_trt.runtime_py.clock import StepClock


class Stream:
    """A stream that has come as far as the test says; marks are numbered as they are enqueued."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.reached = 0

    def mark(self) -> Mark:
        self.enqueued += 1
        return Mark(self, self.enqueued)


class Mark:
    def __init__(self, stream: Stream, number: int):
        self.stream, self.number = stream, number

    def passed(self) -> bool:
        return self.number <= self.stream.reached

    def seconds_until(self, later: Mark) -> float:
        assert later.passed() and self.passed()
        return float(10**later.number - 10**self.number)


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_intervals_wait_until_both_marks_have_passed(stream: Stream) -> None:
    clock = StepClock(stream.mark)  # type: ignore[arg-type]
    clock.mark("target")
    clock.mark("draft")
    assert clock.seconds == {}
    stream.reached = 2
    clock.mark("gap")
    assert clock.seconds == {"target": 90.0}
    stream.reached = 3
    clock.mark("target")
    assert clock.seconds == {"target": 90.0, "draft": 900.0}


def test_phases_of_all_steps_are_added(stream: Stream) -> None:
    clock = StepClock(stream.mark)  # type: ignore[arg-type]
    stream.reached = 99
    for _ in range(2):
        clock.mark("target")
        clock.mark("gap")
    assert clock.seconds == {"target": 90.0 + 9000.0, "gap": 900.0}


def test_a_pause_is_no_gap(stream: Stream) -> None:
    clock = StepClock(stream.mark)  # type: ignore[arg-type]
    stream.reached = 99
    clock.mark("draft")
    clock.mark("gap")
    clock.pause()
    clock.mark("target")
    clock.mark("draft")
    assert clock.seconds == {"draft": 90.0, "target": 9000.0}
