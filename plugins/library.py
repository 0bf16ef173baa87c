"""Finds and loads ``libdspark_plugins.so``, the CUDA kernels behind the operations."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

LIBRARY_NAME = "libdspark_plugins.so"
PLUGIN_ABI = 1
"""Number that plans, this package and the library must share; raised when a field or parameter changes."""


class KernelUnavailableError(RuntimeError):
    """A kernel was needed that no library on this machine provides."""


def find_library() -> Path | None:
    """Path of the library: beside this package (installed) or in ``cpp_plugins/build`` (working tree)."""
    here = Path(__file__).resolve().parent
    candidates = (here / LIBRARY_NAME, here.parent / "cpp_plugins" / "build" / LIBRARY_NAME)
    return next((path for path in candidates if path.is_file()), None)


def describe_library() -> str:
    """Where the library is, or that it is absent, as half a sentence."""
    path = find_library()
    return str(path) if path else f"{LIBRARY_NAME} not found"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        KernelUnavailableError: it is absent, can't be loaded, or has another ABI number.
    """
    path = find_library()
    if path is None:
        raise KernelUnavailableError(
            f"{LIBRARY_NAME} was not found, and the CUDA kernels live in it; build it from cpp_plugins, "
            "or use the torch backend, which runs the operations without it"
        )
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.dspark_plugin_abi())
    except (OSError, AttributeError) as error:
        raise KernelUnavailableError(f"{path} can't be used: {error}; build it again from cpp_plugins") from error
    if found != PLUGIN_ABI:
        raise KernelUnavailableError(
            f"{path} has ABI {found}, this package wants {PLUGIN_ABI}; build it again from cpp_plugins"
        )
    return library
