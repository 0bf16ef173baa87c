"""The CUDA runtime's own functions, for the few that torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def cuda_runtime() -> ctypes.CDLL:
    """The library of the CUDA runtime that torch, a build for CUDA, has loaded.

    Raises:
        OSError: the CUDA runtime of torch's version is not found.
    """
    assert torch.version.cuda is not None
    # torch has the library loaded; the loader finds it by this name.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def function_with_edges(name: str, suffix: str) -> Any:
    """A function that takes the edges of graphs: since CUDA 13 by its plain name, from CUDA 12.3 on with a suffix."""
    assert torch.version.cuda is not None
    before_13 = int(torch.version.cuda.split(".")[0]) < 13
    return getattr(cuda_runtime(), name + (suffix if before_13 else ""))
