"""Where the time of steps goes, on the stream's own clock.

A step is marked at its boundaries: on a GPU by events on the stream, which cost the host about a
microsecond each and never wait, on a CPU by a monotonic clock. Intervals are added up once both of their
marks have passed. The time from the end of one step to the start of the next is the gap in which the
stream waited for the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

GAP = "gap"
"""Between steps."""


class Mark(Protocol):
    """A moment on some clock."""

    def passed(self) -> bool: ...

    def seconds_until(self, later: Any) -> float:
        """Seconds from this mark to a ``later`` one of the same kind; both must have passed."""
        ...

    def renew(self) -> None:
        """Mark this moment instead; in a call that is captured, the moment of every replay."""
        ...


class HostMark:
    """Now, on the host."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._time = time.perf_counter()

    def passed(self) -> bool:
        return True

    def seconds_until(self, later: HostMark) -> float:
        return later._time - self._time


class StreamMark:
    """When the current stream gets here."""

    def __init__(self) -> None:
        # External: a captured record is a node of the graph.
        self._event = torch.cuda.Event(enable_timing=True, external=True)
        self.renew()

    def renew(self) -> None:
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())

    def seconds_until(self, later: StreamMark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1000


class StepClock:
    """Adds up the seconds of each phase of all steps."""

    def __init__(self, mark: Callable[[], Mark] = HostMark):
        self.now = mark
        self._marks: deque[tuple[str, Mark]] = deque()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str, mark: Mark | None = None) -> None:
        """End the previous phase and begin ``phase``, now or at ``mark``; a mark that is renewed must have passed."""
        self._marks.append((phase, mark or self.now()))
        self._add_up()

    def pause(self) -> None:
        """Begin a time that belongs to no step. Waits for the step that is running."""
        if self.now is StreamMark and self._marks:
            torch.cuda.current_stream().synchronize()
        self._add_up()
        self._marks.clear()

    def _add_up(self) -> None:
        while len(self._marks) > 1 and self._marks[1][1].passed():
            name, start = self._marks.popleft()
            self.seconds[name] = self.seconds.get(name, 0.0) + start.seconds_until(self._marks[0][1])
