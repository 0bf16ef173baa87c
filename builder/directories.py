"""Directories that the commands read and write: which kind one is, and how a new one is made.

Three kinds follow each other: a released checkpoint, rank shards, engines. All have a ``config.json`` and are passed
to commands that look alike, so the commonest mistake is to pass the wrong one. :func:`check_kind` says which kind was
found and which command takes it.

A new directory is written beside its place and renamed when complete, so a directory of that name is whole. What
would make the renaming fail (a mount point, the current directory, a parent that can't be written) is refused before
any work.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from .json_values import read_object

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_FORMAT = "dspark-trt shards"
ENGINE_FORMAT = "dspark-trt engines"
WEIGHTS = "weights"
_FORMATS = {"shards": SHARD_FORMAT, "engines": ENGINE_FORMAT}
_MADE_BY = {"shards": "dspark-convert", "engines": "dspark-build"}

DirectoryKind = Literal["released", "shards", "engines"]
NAMES: dict[DirectoryKind, str] = {
    "released": "a released checkpoint",
    "shards": "rank shards",
    "engines": "an engine directory",
}
_TAKEN_BY: dict[DirectoryKind, str] = {
    "released": "dspark-convert --checkpoint takes it, and makes rank shards of it",
    "shards": "dspark-build --checkpoint takes them, and makes an engine directory of them",
    "engines": "examples/run.py --engine-dir takes it",
}


def kind_of(directory: Path) -> DirectoryKind | None:
    """What a directory is, also where its ``config.json`` is missing or damaged; None for anything else."""
    try:
        return _kind_of(directory)
    except OSError:  # it may not be read; its reader says so
        return None


def _kind_of(directory: Path) -> DirectoryKind | None:
    try:
        declared = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8")).get("format")
    except (FileNotFoundError, ValueError, AttributeError):
        declared = None
    if declared in (SHARD_FORMAT, ENGINE_FORMAT):
        return "shards" if declared == SHARD_FORMAT else "engines"
    if any((directory / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        return "released"
    if (directory / WEIGHTS).is_dir() and (directory / "draft").is_dir():
        return "engines"
    return "shards" if any(directory.glob("rank*.safetensors")) else None


def check_kind(directory: Path, wanted: DirectoryKind, error: type[Exception]) -> None:
    """Raise ``error`` if ``directory`` is one of another kind; one of no kind is left to its reader."""
    found = kind_of(directory)
    if found not in (None, wanted):
        raise error(f"{directory}: holds {NAMES[found]}, expected {NAMES[wanted]}; {_TAKEN_BY[found]}")


def read_dir_header(
    directory: Path,
    kind: Literal["shards", "engines"],
    version: int,
    error: type[Exception],
    *,
    remedy: str,
    outdated: str,
) -> dict[str, Any]:
    """The values in the ``config.json`` of a directory that this package wrote, of this version.

    Args:
        error: what to raise where that is not what was found.
        remedy: what to do about a file that is damaged.
        outdated: what to do about one of another version.
    """
    check_kind(directory, kind, error)
    path, wanted = directory / CONFIG_NAME, (_FORMATS[kind], version)
    absent = f"expected a directory that {_MADE_BY[kind]} wrote"
    values = read_object(path, error, absent=absent, remedy=remedy)
    if (found := (values.get("format"), values.get("version"))) != wanted:
        raise error(
            f"{path}: format {found[0]!r} version {found[1]!r}, expected {wanted[0]!r} version {wanted[1]}; {outdated}"
        )
    return values


def file_problems(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with files that a header lists with their sizes, ``bytes``, below ``directory``."""
    problems = []
    for name, facts in files.items():
        file = directory / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != facts["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, {facts['bytes']} were written")
    return problems


def check_new(output: Path, error: type[Exception]) -> None:
    """Raise ``error`` unless a new directory can get the name ``output``; changes nothing.

    An empty directory is replaced, unless it is in a place that can't be.
    """
    if output.is_symlink():
        raise _not_replaced(output, "a symbolic link", error)
    if output.exists():
        if output.samefile(Path.cwd()):
            raise _not_replaced(output, "the current directory", error)
        if os.path.ismount(output):
            raise _not_replaced(output, "a mount point", error)
        if not output.is_dir() or any(output.iterdir()):
            raise error(f"{output}: exists already; remove it or pass another --output")
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir():
        raise error(f"{output}: {parent} is a file, expected a directory; pass another --output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise error(f"{output}: {parent} is not writable for this user; pass an --output where you may write")


@contextmanager
def new_directory(output: Path, error: type[Exception]) -> Iterator[Path]:
    """A directory that is renamed to ``output`` if the block succeeds, and removed if it fails.

    Raises:
        error: ``output`` is in use, being made by another process, or can't be made, before the block starts; or
            somebody else took the name meanwhile.
    """
    check_new(output, error)
    _check_other_runs(output, error)
    partial = output.parent / f"{_partial_prefix(output)}{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except FileExistsError:
        raise error(f"{partial}: exists already, left by a run that was killed; remove it") from None
    except OSError as problem:
        raise error(f"{output}: can't be made ({problem.strerror}); pass an --output where you may write") from None
    replaced, complete = output.exists(), False
    try:
        if replaced:
            try:
                output.rmdir()  # fails now for mounts that look like plain directories, not after hours of work
            except OSError as problem:
                replaced = False
                raise _not_replaced(output, f"busy ({problem.strerror})", error) from None
        yield partial
        complete = True
        try:
            partial.rename(output)
        except OSError as problem:
            raise error(
                f"{output}: another directory took its place meanwhile ({problem.strerror}); what was made is complete "
                f"in {partial}, rename it"
            ) from None
    except BaseException:
        if replaced:
            output.mkdir(exist_ok=True)
        if not complete:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial_prefix(output: Path) -> str:
    return f".{output.name}.partial-"


def _check_other_runs(output: Path, error: type[Exception]) -> None:
    """Raise ``error`` if a process is making ``output``; say what one that was killed has left."""
    prefix = _partial_prefix(output)
    for found in output.parent.glob(f"{glob.escape(prefix)}*"):
        process = found.name.removeprefix(prefix)
        if process.isdigit() and int(process) != os.getpid():
            if _runs(int(process)):
                raise error(
                    f"{output}: process {process} is making it, in {found}; wait for it, or pass another --output"
                )
            logger.warning("%s was left by a process that does not run any more; remove it", found)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True


def _not_replaced(output: Path, why: str, error: type[Exception]) -> Exception:
    return error(
        f"{output}: is {why}, which can't be replaced by the finished directory; pass a new one in it, such as "
        f"--output {output / 'new'}"
    )
