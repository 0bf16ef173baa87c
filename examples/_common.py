"""What the examples share: text to token ids and back, files of users, plots, what computes, and a job with its ending.

The exit status of a job is 2 where what was asked for is refused: options, prompts, the directory, the number of
ranks. It is 1 where a rank failed while it ran, or where the program compares and finds a difference.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro
from dspark_trt.builder.checkpoint import CheckpointError, DamagedWeightsError, rank_file_name
from dspark_trt.builder.checkpoint.tensor_file import read_header
from dspark_trt.builder.config import ConfigError
from dspark_trt.builder.engine_dir import WEIGHTS, EngineDir, EngineDirError
from dspark_trt.plugins.library import KernelUnavailableError
from dspark_trt.plugins.tensorrt_api import EngineLoadError, TensorRTUnavailableError
from dspark_trt.runtime_py.acceptance import ScheduleError
from dspark_trt.runtime_py.backend import Backend, Executor, choose_executor
from dspark_trt.runtime_py.communicator import Communicator, LaunchError, check_alike, connect, fail_together
from dspark_trt.runtime_py.device import DeviceChoice, rank_device
from dspark_trt.runtime_py.mapping import MappingError
from dspark_trt.runtime_py.opening import read_tokenizer
from dspark_trt.runtime_py.output_files import OutputError
from dspark_trt.runtime_py.requests import RequestError
from dspark_trt.runtime_py.stock import StockError
from dspark_trt.runtime_py.watchdog import DEFAULT_TIMEOUT_S, Progress, Watchdog
from rich.console import Console

T = TypeVar("T")
REFUSALS: tuple[type[Exception], ...] = (
    ConfigError,
    DamagedWeightsError,
    EngineDirError,
    EngineLoadError,
    KernelUnavailableError,
    LaunchError,
    MappingError,
    RequestError,
    ScheduleError,
    StockError,
    TensorRTUnavailableError,
)
"""Errors of what was asked for, for ``fail_together``. Other CheckpointErrors are none: weights that can't be used are
found by :func:`open_engine_dir`, and what is left is a disk that fails while they are read. Nor are MailboxError and
BoundaryError, which also tell of a step that went wrong."""


class Output(Console):
    """Standard output of rank 0, in plain text; the other ranks print nothing.

    Characters that its encoding lacks are replaced. :class:`OutputError` if it takes no more.
    """

    def __init__(self, rank: int = 0, **options: Any):
        # mpirun gives rank 0 a terminal even where its own output is a file, so no colours.
        super().__init__(quiet=rank != 0, markup=False, highlight=False, color_system=None, **options)
        if isinstance(self.file, io.TextIOWrapper):
            self.file.reconfigure(errors="replace")

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.quiet = True
            # What is left in buffers would fail once more when the program ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            raise OutputError(
                f"standard output: {error.strerror}, expected room for what is printed; keep its reader running, or "
                "redirect it to a file on a disk with room"
            ) from None

    def on_broken_pipe(self) -> None:
        raise  # in place of rich's exit without a word


def parse_options(kind: type[T], arguments: Sequence[str] | None, description: str | None) -> T:
    """The options of a command line, as ``tyro.cli`` gives them.

    Ends the program with status 2, as tyro does, where a flag of several values is there without a value, or twice:
    tyro would take the last of them.
    """
    options = tyro.cli(kind, args=arguments, description=description)
    words = sys.argv[1:] if arguments is None else arguments
    given = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    problems = []
    for flag, values in _flags_of_several(options):
        if (times := given.count(flag)) > 1:
            problems.append(f"{flag} was given {times} times, expected once; pass all values after one")
        elif times and not values:
            problems.append(f"{flag} names none, expected at least one; leave the option out for the default")
    if problems:
        print(f"error: {'; '.join(problems)}", file=sys.stderr)
        sys.exit(2)
    return options


def _flags_of_several(options: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """The flags of several values, with these, of a dataclass and of those in it, whose flags have no prefix."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flags_of_several(value)
        elif isinstance(value, (tuple, list)):
            yield f"--{field.name.replace('_', '-')}", value


class Text:
    """A directory's tokenizer, with the model's beginning-of-sequence token in front of every prompt."""

    def __init__(self, directory: Path, bos_token_id: int | None):
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise RequestError(f"{file}: not found; text prompts need the checkpoint's tokenizer.json, copy it there")
        self._tokenizer = read_tokenizer(file, "copy the checkpoint's tokenizer.json again")
        self._prefix = [] if bos_token_id is None else [bos_token_id]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt; RequestError for what is no text, such as bytes on a command line that are not UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt {text[:40]!a}: character {error.start} is U+{ord(text[error.start]):04X}, which is no text; "
                "pass the prompt in UTF-8"
            ) from None
        return self._prefix + list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def read_text(path: Path, wanted: str) -> str:
    """The text of a file in UTF-8, or RequestError, which says what was ``wanted``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; pass {wanted}") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: byte {error.start} is 0x{error.object[error.start]:02x}, which is not UTF-8; pass {wanted}, "
            "saved as UTF-8"
        ) from None


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one per line; empty lines are passed over."""
    # str.splitlines would also split at form feeds and other characters that a text may hold.
    lines = read_text(path, "a file with one prompt per line").split("\n")
    if not (prompts := [line for line in lines if line.strip()]):
        raise RequestError(f"{path}: no prompt in it; expected one per line")
    return prompts


def check_output(path: Path, flag: str, *, suffixes: Iterable[str] = (), directory: bool = False) -> None:
    """Raise RequestError if ``path`` can't be written: before any work, or the work would be lost. Makes nothing.

    Args:
        flag: the option that names the path, for the message.
        suffixes: how the name may end, in small letters; none for any.
        directory: the path is of a directory to write files in, not of a file.
    """
    place = path if directory else path.parent
    # What is missing below the first one that is there will be made.
    there = next((p for p in (place, *place.parents) if os.path.lexists(p)), place)
    if (known := tuple(suffixes)) and not path.name.lower().endswith(known):
        problem = f"ends in none of {', '.join(known)}; pass a name with one of these endings"
    elif not directory and path.is_dir():
        problem = "is a directory, expected the name of a file; pass one"
    elif not there.is_dir():
        problem = f"{there} is not a directory, expected one to write in; pass another path"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"the directory {there} is not writable; pass another path or change its permissions"
    elif not directory and os.path.lexists(path) and not os.access(path, os.W_OK):
        problem = "the file is not writable; pass another path or change its permissions"
    else:
        return
    raise RequestError(f"{flag} {path}: {problem}")


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


def image_suffixes(pyplot: Any) -> list[str]:
    """Endings of the images that matplotlib writes by itself."""
    figure = pyplot.figure()
    kinds = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    return [f".{kind}" for kind in sorted(kinds) if kind != "pgf"]  # that is LaTeX's


def device_name(place: torch.device) -> str:
    """What computes, for people."""
    return "the CPU" if place.type == "cpu" else torch.cuda.get_device_name(place)


def open_engine_dir(path: Path) -> EngineDir:
    """An engine directory whose header, files and weights' headers can be read; EngineDirError if not.

    Every rank looks at the files of all, so that all refuse together.
    """
    try:
        directory = EngineDir.open(path)
        for rank in range(directory.tp_size):
            read_header(path / WEIGHTS / rank_file_name(rank))
    except OSError as error:
        raise EngineDirError(
            f"{error.filename or path}: {error.strerror or error}; expected a directory that dspark-build wrote, "
            "readable for this user; pass another --engine-dir or change its permissions"
        ) from None
    except CheckpointError as error:
        raise EngineDirError(f"{error}, or copy the engine directory again") from None
    return directory


def open_job(engine_dir: Path, command: str) -> tuple[EngineDir, Communicator] | None:
    """An engine directory and the ranks that were started for it; None, with the error printed, if they don't fit.

    Args:
        command: how the user starts the program, for the error's advice.
    """
    try:
        directory = open_engine_dir(engine_dir)
        return directory, connect(directory.tp_size, command)
    except (EngineDirError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None


def announced_executor(
    directory: EngineDir, communicator: Communicator, device: DeviceChoice, backend: Backend, console: Output
) -> tuple[torch.device, Executor]:
    """Where this rank computes and with what, agreed on by all ranks; the first line that programs print."""
    check_alike(communicator, device=device, backend=backend)
    place = rank_device(communicator, device)
    executor = choose_executor(directory, communicator, place, backend)
    console.print(f"executor: {executor}; ranks: {communicator.size}")
    return place, executor


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
