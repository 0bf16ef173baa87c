"""The CUDA runtime's own functions, for the few that torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class CudaRuntimeError(RuntimeError):
    """The CUDA runtime is not there."""


def cuda_runtime() -> ctypes.CDLL:
    """The library of the CUDA runtime that torch, a build for CUDA, has loaded.

    Raises:
        CudaRuntimeError: torch is no build for CUDA, or the loader does not find the runtime of its version.
    """
    name = f"libcudart.so.{_cuda_major()}"
    try:
        return ctypes.CDLL(name)  # torch has it loaded; the loader finds it by this name
    except OSError as error:
        raise CudaRuntimeError(
            f"{name} is not found ({error}), expected what torch {torch.__version__} runs on; install torch together "
            "with its CUDA packages"
        ) from None


def _cuda_major() -> int:
    if torch.version.cuda is None:
        raise CudaRuntimeError(
            f"torch {torch.__version__} is no build for CUDA; install one that is, or pass --device cpu"
        )
    return int(torch.version.cuda.split(".")[0])


def function_with_edges(name: str, suffix: str) -> Any:
    """A function that takes the edges of graphs: since CUDA 13 by its plain name, from CUDA 12.3 on with a suffix.

    Raises:
        CudaRuntimeError: as :func:`cuda_runtime`.
    """
    return getattr(cuda_runtime(), name + (suffix if _cuda_major() < 13 else ""))
