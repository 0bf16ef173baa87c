"""Ends an interrupted command as an error would end it, so that nothing half made is left behind.

Ctrl-C raises an exception in Python; SIGTERM, by which batch systems end a job, would end the process at once. Inside
:func:`raised_interrupts` it raises too. While the process is in a library's call, such as a build by TensorRT, both
wait for the call to return; a second SIGTERM does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end, other than Ctrl-C's."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Raise :class:`Interrupted` where SIGTERM arrives. Signals come to the main thread; others are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, before)
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, interrupt) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """What a shell reports of a process that the signal ended."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
