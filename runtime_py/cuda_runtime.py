"""The CUDA runtime's own functions, for the few that torch does not offer."""

from __future__ import annotations

import ctypes

import torch


def cuda_runtime() -> ctypes.CDLL:
    """The library of the CUDA runtime that torch, a build for CUDA, has loaded.

    Raises:
        OSError: the CUDA runtime of torch's version is not found.
    """
    assert torch.version.cuda is not None
    # torch has the library loaded; the loader finds it by this name.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
