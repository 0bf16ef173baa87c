"""Writes what was asked for, or says in one line why it can't be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OutputError(RuntimeError):
    """What was asked for can't be written: a file, or standard output."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes the file ``path``, in a directory that is made; OutputError with the reason if it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: {error.strerror or error}, expected to write the file there; make room, lift the limit on the "
            "size of files, or pass another path"
        ) from None
