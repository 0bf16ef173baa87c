"""Finds and loads ``libdspark_plugins.so``, the CUDA kernels behind the operations, and the library beside it that
makes them TensorRT plugins without Python."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

LIBRARY_NAME = "libdspark_plugins.so"
TRT_LIBRARY_NAME = "libdspark_trt_plugins.so"
PLUGIN_ABI = 4
"""Number that plans, this package and the library must share; raised when a field or parameter changes."""


class KernelUnavailableError(RuntimeError):
    """A kernel was needed that no library on this machine provides."""


def find_library(name: str = LIBRARY_NAME) -> Path | None:
    """Path of a library: beside this package (installed) or in ``cpp_plugins/build`` (working tree)."""
    here = Path(__file__).resolve().parent
    candidates = (here / name, here.parent / "cpp_plugins" / "build" / name)
    return next((path for path in candidates if path.is_file()), None)


def describe_library(name: str = LIBRARY_NAME) -> str:
    """Where a library is, or that it is absent, as half a sentence."""
    path = find_library(name)
    return str(path) if path else f"{name} not found"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        KernelUnavailableError: it is absent, can't be loaded, or has another ABI number.
    """
    path = find_library()
    if path is None:
        raise KernelUnavailableError(
            f"{LIBRARY_NAME} was not found, and the CUDA kernels live in it; install again where nvcc and cmake are "
            "found, build it from cpp_plugins, or pass --device cpu, where operations run as their references"
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


def load_trt_plugins(major: int) -> Path:
    """Load ``libdspark_trt_plugins.so``, which registers its creators with the loaded TensorRT; its path.

    Args:
        major: of that TensorRT; the library serves the kind of plugins whose headers it was compiled with.

    Raises:
        KernelUnavailableError: it is absent, can't be loaded, or was compiled for another kind.
    """
    remedy = f"build cpp_plugins with -DTENSORRT_INCLUDE_DIR=<headers of TensorRT {major}>"
    path = find_library(TRT_LIBRARY_NAME)
    if path is None:
        raise KernelUnavailableError(
            f"{TRT_LIBRARY_NAME} was not found, and plugins for TensorRT {major} live in it; {remedy}"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailableError(f"{path} can't be used: {error}; {remedy}") from error
    # What TensorRT calls to get the creators has another name for each kind of plugin.
    found = [name for name in ("getPluginCreators", "getCreators") if hasattr(library, name)]
    wanted = "getPluginCreators" if major <= 8 else "getCreators"
    if wanted not in found:
        kinds = {"getPluginCreators": "TensorRT 8", "getCreators": "TensorRT 10 and up"}
        made_for = " and ".join(kinds[name] for name in found) or "no TensorRT"
        raise KernelUnavailableError(f"{path} has plugins for {made_for}, not for TensorRT {major}; {remedy}")
    return path
