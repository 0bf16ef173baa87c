"""Which executor runs an engine directory here: TensorRT or torch, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..builder.engine_dir import EngineDir, EngineDirError
from ..plugins import tensorrt_api
from ..plugins.tensorrt_api import TensorRT, TensorRTUnavailableError
from .communicator import Communicator

Backend = Literal["auto", "torch", "tensorrt"]


@dataclass(frozen=True)
class Executor:
    """What runs the networks, and why the other executor does not, in half a sentence."""

    api: TensorRT | None
    """The TensorRT that runs the engines; None for the torch session."""
    device: torch.device
    reason: str = ""

    def __str__(self) -> str:
        where = "the CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        name = str(self.api) if self.api else "torch session"
        return f"{name} on {where}" + (f" ({self.reason})" if self.reason else "")


def choose_executor(
    directory: EngineDir, communicator: Communicator, device: torch.device, backend: Backend
) -> Executor:
    """The executor of all ranks; every rank calls this. TensorRT where its engines run on every rank, else torch.

    Args:
        device: of this rank.

    Raises:
        TensorRTUnavailableError: the same on every rank; TensorRT was asked for and can't run the engines on one.
    """
    if backend == "torch":
        return Executor(None, device, "--backend torch")
    found = why_not_tensorrt(directory, device)
    problems = communicator.all_gather_object(found if isinstance(found, str) else None)
    told = [problem for problem in problems if problem is not None]
    if not told:
        assert not isinstance(found, str)
        return Executor(found, device)
    if backend == "tensorrt":
        raise TensorRTUnavailableError(f"--backend tensorrt: {told[0]}. Leave the option out to use the torch session")
    return Executor(None, device, told[0])


def why_not_tensorrt(directory: EngineDir, device: torch.device) -> TensorRT | str:
    """The TensorRT that runs the engines of a directory on ``device``, or why none does, as half a sentence."""
    product, version = directory.tensorrt["product"], directory.tensorrt["version"]
    found = tensorrt_api.probe(product)
    if isinstance(found, str):
        return f"its plans need {product} {version}, which is not installed here: {found}"
    if device.type != "cuda":
        wanted = " or ".join(directory.compute_capabilities)
        return f"its plans, of {product} {version}, need a GPU of compute capability {wanted}; there is none here"
    major, minor = torch.cuda.get_device_capability(device)
    try:
        directory.check_runtime(product, found.version, f"{major}.{minor}", directory.tp_size)
    except EngineDirError as error:
        return str(error)
    return found
