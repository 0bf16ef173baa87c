"""The collectives that the runtime needs, as a small interface: over MPI, or for a single process.

MPI is initialised when the first communicator is made, never by an import. mpi4py is imported in this
module alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..builder.interrupts import exit_status


class LaunchError(RuntimeError):
    """A job was started in a way that its engines can't run."""


class Communicator(Protocol):
    """Collectives of one job; every rank calls them in the same order."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] on each rank -> [size, ...] on every rank, in rank order; the bits travel unchanged."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]: ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def barrier(self) -> None: ...

    def abort(self, code: int) -> None:
        """End every rank of the job."""
        ...


FORWARDING_SECONDS = 0.2
"""How long a rank that aborts the job waits for its launcher to pass on what it printed: a launcher that is told to end
may drop the line that says why."""


class SingleProcess:
    """The communicator of a job of one rank that was started without a launcher."""

    rank, size = 0, 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if threading.current_thread() is not threading.main_thread():
            os._exit(code)  # sys.exit would end no more than the thread
        sys.exit(code)


class MpiCommunicator:
    """The ranks of ``MPI_COMM_WORLD``.

    Raises:
        LaunchError: mpi4py is not installed, or finds no MPI.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                f"this process was started by an MPI launcher, and mpi4py can't be used ({error}); install it with the "
                "launcher's MPI: pip install '.[mpi]' in the repository"
            ) from None
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def all_gather(self, tensor: Tensor) -> Tensor:
        sent = tensor.detach().cpu().contiguous()
        received = torch.empty((self.size, *sent.shape), dtype=sent.dtype)
        # As bytes: MPI has no bfloat16, and the values must not be converted.
        self._world.Allgather(_bytes(sent), _bytes(received))
        return received.to(tensor.device)

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))

    def broadcast(self, value: Any) -> Any:
        return self._world.bcast(value)

    def barrier(self) -> None:
        self._world.Barrier()

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(FORWARDING_SECONDS)
        self._world.Abort(code)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def launcher_ranks(environment: Mapping[str, str] | None = None) -> int | None:
    """How many ranks the launcher of this process says there are; None without a launcher.

    Raises:
        LaunchError: the launcher's variable is no number.
    """
    environment = os.environ if environment is None else environment
    # Open MPI; MPICH and its relatives (PMI); Slurm's own launcher.
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"):
        if name in environment:
            try:
                return int(environment[name])
            except ValueError:
                raise LaunchError(
                    f"{name} is {environment[name]!r}, expected a number of ranks; start the program with mpirun, or "
                    "unset the variable to run without a launcher"
                ) from None
    return None


def connect(tp_size: int, command: str = "python ...") -> Communicator:
    """The communicator of a job that runs engines built for ``tp_size`` ranks.

    Args:
        command: how the user starts the program, for the error's advice.

    Raises:
        LaunchError: the job has another number of ranks, MPI sees another number than the launcher, or, on every rank,
            ranks have engines for different numbers of ranks.
    """
    announced = launcher_ranks()
    if announced is None and tp_size == 1:
        return SingleProcess()
    advice = f"Start it with: mpirun -n {tp_size} {command}"
    if announced is None:
        raise LaunchError(
            f"the engines were built for {tp_size} ranks (tensor parallel), but this process was started "
            f"without an MPI launcher. {advice}"
        )
    communicator = MpiCommunicator()
    if communicator.size != announced:
        raise LaunchError(
            f"the launcher started {announced} ranks, but MPI sees {communicator.size}: mpi4py uses another MPI "
            f"than the launcher. Use the mpirun of the environment that mpi4py is installed in. {advice}"
        )
    # One rank that ended here would leave the others waiting for it.
    everyone = communicator.all_gather_object(tp_size)
    if len(set(everyone)) > 1:
        found = ", ".join(f"those of rank {rank} were built for {size}" for rank, size in enumerate(everyone))
        raise LaunchError(
            f"rank {communicator.rank}: ranks have engines for different numbers of ranks: {found}; give every rank "
            "the same directory"
        )
    if communicator.size != tp_size:
        raise LaunchError(
            f"rank {communicator.rank}: the engines were built for {tp_size} ranks, this job has "
            f"{communicator.size}. {advice}"
        )
    return communicator


def check_alike(communicator: Communicator, **options: object) -> None:
    """Raise on every rank if options differ between ranks: steps of different kinds would wait for each other for ever.

    Raises:
        LaunchError: naming the options and what each rank has.
    """
    everyone = communicator.all_gather_object(options)
    problems = [
        f"{name}: {', '.join(f'rank {rank} {found[name]}' for rank, found in enumerate(everyone))}"
        for name in options
        if any(found[name] != everyone[0][name] for found in everyone)
    ]
    if problems:
        raise LaunchError(f"ranks were started with different options, give every rank the same. {'; '.join(problems)}")


@contextmanager
def fail_together(
    communicator: Communicator,
    *,
    refusals: tuple[type[Exception], ...] = (),
    where: Callable[[], str | None] = lambda: None,
    debug: bool = False,
) -> Iterator[None]:
    """End the whole job when this rank fails: the others would wait for it in a collective for ever.

    The error is printed with the rank, with a traceback if it is not one of the package's own or
    ``debug`` is set.

    Args:
        refusals: errors of what was asked for. They end the job with exit status 2, Ctrl-C with 130, others with 1.
        where: what the rank was doing when it failed, for the error line; not used for refusals.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:  # every way to fail must end the other ranks too
        interrupted = isinstance(error, KeyboardInterrupt)
        if debug or not (interrupted or type(error).__module__.startswith("dspark_trt.")):
            traceback.print_exc()
        refused = isinstance(error, refusals)
        place = None if refused else where()
        told = "interrupted (Ctrl-C)" if interrupted else f"{type(error).__name__}: {error}"
        told += f" [in {place}]" if place else ""
        print(f"rank {communicator.rank}: {told}", file=sys.stderr, flush=True)
        communicator.abort(2 if refused else exit_status(error) if isinstance(error, KeyboardInterrupt) else 1)
