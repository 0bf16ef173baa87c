"""The engines of a directory as Polygraphy runners, where they run, and why not, where they don't."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from _runners import SessionRunner
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.builder.network import Kind
from dspark_trt.plugins.tensorrt_api import TensorRT
from dspark_trt.runtime_py.backend import Backend, choose_executor
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.device import Platform, open_engine_platform, rank_device
from dspark_trt.runtime_py.tensorrt_session import open_session

TENSORRT = "tensorrt"
PEER_TIMEOUT_S = 60.0
"""How long a kernel waits for another rank, which may still be at the runner before this one."""


@dataclass(frozen=True)
class Engines:
    """The engines of a directory on this rank's GPU, and what connects it with those of the other ranks."""

    directory: EngineDir
    api: TensorRT
    platform: Platform
    communicator: Communicator

    def runner(self, kind: Kind) -> SessionRunner:
        """The engine of one network, loaded; errors as of ``open_session``."""
        rank, size, mailbox = self.communicator.rank, self.communicator.size, self.platform.mailbox
        tensor = self.platform.mailbox_tensor
        session = open_session(self.directory, kind, rank, self.api, world_size=size, mailbox=tensor)
        check = mailbox.check if mailbox else (lambda: None)
        return SessionRunner(session, TENSORRT, self.platform.device, check)


@contextmanager
def open_engines(
    directory: EngineDir, build: BuildConfig, communicator: Communicator, backend: Backend = "auto"
) -> Iterator[Engines | str]:
    """The engines of ``directory``, or why they are left out, the same on every rank; every rank calls this.

    Args:
        build: what is compared; engines compute what they were built for and nothing else.
        backend: torch leaves the engines out.

    Raises:
        LaunchError, MailboxError: the engines' ranks can't be connected.
    """
    built = directory.build
    if (build.numerics, build.dtype) != (built.numerics, built.dtype):
        yield (
            f"its engines compute {built.numerics.value} numerics in {built.dtype}, not {build.numerics.value} in "
            f"{build.dtype}; leave --numerics and --dtype out to compare them"
        )
        return
    executor = choose_executor(directory, communicator, rank_device(communicator, "auto"), backend)
    if executor.api is None:
        yield executor.reason
        return
    platform = open_engine_platform(directory, communicator, executor.device, peer_timeout_s=PEER_TIMEOUT_S)
    yield Engines(directory, executor.api, platform, communicator)
    # Not after an error: closing waits for the other ranks, and a rank that fails ends the job.
    platform.close()
