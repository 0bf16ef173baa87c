"""Ends a job that no longer gets anywhere, and says where each rank stood.

If one rank stops, the others wait for it for ever, without a message. So every rank runs a thread beside its work that
knows what the rank enqueued last and how long that may take. When the time is up, the rank reports it; the ranks that
wait do the same, because their time is up too. A little later, when all have reported, the first of them ends the job.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

DEFAULT_TIMEOUT_S = 300.0
GRACE_S = 2.0
"""Between a rank's message and the end of the job, so that the other ranks' messages come out."""


class WatchdogError(ValueError):
    """A watchdog was asked for that could watch nothing."""


class Progress:
    """Takes what a decoder reports about its work and ignores it; :class:`Watchdog` uses it."""

    @contextmanager
    def operation(self, name: str, *, extra_s: float = 0.0) -> Iterator[None]:
        """Enclose work that must end in time. Operations may be nested; the innermost is the one that is timed.

        Args:
            extra_s: seconds that it may take beyond those that every operation may take.
        """
        yield

    def enqueued(self, name: str) -> None:
        """Note what the running operation enqueued last."""


class Watchdog(Progress):
    """Watches one rank; use as a context manager around the work, and :meth:`operation` around its parts.

    Args:
        rank: named in the message.
        abort: ends all ranks; called on the watchdog's own thread.
        timeout_s: how long an operation may take, and one that contains others, between two of them.

    Raises:
        WatchdogError: ``timeout_s`` is not above 0.
    """

    def __init__(
        self,
        rank: int,
        abort: Callable[[int], None],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        grace_s: float = GRACE_S,
        output: TextIO | None = None,
    ):
        if not timeout_s > 0:
            raise WatchdogError(
                f"a watchdog's timeout is {timeout_s} s, expected more than 0; leave it out for {DEFAULT_TIMEOUT_S:g} s"
            )
        self._rank, self._abort, self._timeout_s, self._grace_s = rank, abort, timeout_s, grace_s
        self._output = output
        self._changed = threading.Condition()
        # What runs now, innermost last: name, since when it has made no progress, how long it may make none.
        self._running: list[tuple[str, float, float]] = []
        self._last = "nothing"
        self.failed_in: str | None = None
        """The innermost operation that the last error ended, with what it enqueued last."""
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {rank}", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    @contextmanager
    def operation(self, name: str, *, extra_s: float = 0.0) -> Iterator[None]:
        if sys.exc_info()[0] is None:  # an earlier error was dealt with; one under way keeps its place
            self.failed_in = None
        with self._changed:
            self._running.append((name, time.monotonic(), self._timeout_s + extra_s))
            self._last = name
            self._changed.notify()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or f"{name}; last enqueued: {self._last}"
            raise
        finally:
            with self._changed:
                self._running.pop()
                if self._running:  # the outer one goes on, with its whole time
                    outer, _, allowed = self._running[-1]
                    self._running[-1] = (outer, time.monotonic(), allowed)
                self._changed.notify()

    def enqueued(self, name: str) -> None:
        self._last = name

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                if not self._running:
                    self._changed.wait()
                    continue
                name, since, allowed = self._running[-1]
                if now < since + allowed:
                    self._changed.wait(min(since + allowed - now, threading.TIMEOUT_MAX))
                    continue
                break
            else:
                return
            message = (
                f"rank {self._rank}: {name} has not gone on for {now - since:.0f} s; last enqueued: {self._last}. "
                "Another rank ended or does something else, or the time is too short (--timeout); ending the job"
            )
        print(message, file=self._output or sys.stderr, flush=True)
        time.sleep(self._grace_s)
        self._abort(1)
