"""What the examples share: text to token ids and back, prompt files, plots, what computes, and a job with its ending.

The exit status of a job is 2 where what was asked for is refused: options, prompts, the directory, the number of
ranks. It is 1 where a rank failed while it ran, or where the program compares and finds a difference.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError
from dspark_trt.plugins.tensorrt_api import TensorRTUnavailableError
from dspark_trt.runtime_py.acceptance import ScheduleError
from dspark_trt.runtime_py.communicator import Communicator, LaunchError, connect, fail_together
from dspark_trt.runtime_py.requests import RequestError
from dspark_trt.runtime_py.watchdog import DEFAULT_TIMEOUT_S, Progress, Watchdog
from tokenizers import Tokenizer

REFUSALS = (EngineDirError, LaunchError, RequestError, ScheduleError, TensorRTUnavailableError)
"""Errors of what was asked for, for ``fail_together``."""


class Text:
    """A directory's tokenizer, with the model's beginning-of-sequence token in front of every prompt."""

    def __init__(self, directory: Path, bos_token_id: int | None):
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise RequestError(f"{file}: not found; text prompts need the checkpoint's tokenizer.json, copy it there")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._prefix = [] if bos_token_id is None else [bos_token_id]

    def encode(self, text: str) -> list[int]:
        return self._prefix + list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one a line; empty lines are passed over."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; pass a file with one prompt a line") from None
    if not (prompts := [line for line in lines if line.strip()]):
        raise RequestError(f"{path}: no prompt in it; expected one a line")
    return prompts


def import_pyplot() -> Any:
    """matplotlib's drawing functions without a display, or RequestError with what to install."""
    try:
        import matplotlib
    except ImportError:
        raise RequestError(
            "the plot needs matplotlib; install it with: pip install '.[plot]' in the repository"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def device_name(place: torch.device) -> str:
    """What computes, for people."""
    return "the CPU" if place.type == "cpu" else torch.cuda.get_device_name(place)


def open_job(engine_dir: Path, command: str) -> tuple[EngineDir, Communicator] | None:
    """An engine directory and the ranks that were started for it; None, with the error printed, if they don't fit.

    Args:
        command: how the user starts the program, for the error's advice.
    """
    try:
        directory = EngineDir.open(engine_dir)
        return directory, connect(directory.tp_size, command)
    except (EngineDirError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None


@contextmanager
def watched(communicator: Communicator, *, timeout_s: float, debug: bool) -> Iterator[Progress]:
    """Around a rank's work: a failure ends the whole job, and so do ``timeout_s`` seconds in which it does not go on.

    Yields what is to be told about operations. ``debug`` shows tracebacks.
    """
    watchdog: Watchdog | None = None

    def where() -> str | None:
        return watchdog.failed_in if watchdog else None

    with fail_together(communicator, refusals=REFUSALS, where=where, debug=debug):
        if not 0 < timeout_s < math.inf:
            raise RequestError(
                f"--timeout is {timeout_s}, expected a number of seconds above 0; leave it out for "
                f"{DEFAULT_TIMEOUT_S:g}"
            )
        watchdog = Watchdog(communicator.rank, communicator.abort, timeout_s=timeout_s)
        with watchdog, watchdog.operation("the job"):
            yield watchdog
