"""Ends an interrupted command as an error would end it, so that nothing half made is left behind.

Ctrl-C raises an exception in Python; SIGTERM, by which batch systems end a job, and SIGHUP, when a terminal is lost,
would end the process at once. Inside :func:`raised_interrupts` they raise too. While the process is in a library's
call, such as a build by TensorRT, all of them wait for the call to return; a second signal does not.
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
    """Raise :class:`Interrupted` where SIGTERM or SIGHUP arrives, unless it is ignored, as under nohup.

    Signals come to the main thread; others are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    handlers = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number) or signal.SIG_DFL) is not signal.SIG_IGN
    }

    def interrupt(number: int, _: FrameType | None) -> None:
        restore()
        raise Interrupted(number)

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    for number in handlers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        restore()


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """What a shell reports of a process that the signal ended."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
