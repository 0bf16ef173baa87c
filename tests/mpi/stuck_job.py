"""A job whose rank 1 gets stuck in the phase that is named on the command line; the others wait for it."""

from __future__ import annotations

import sys
import time

from dspark_trt.runtime_py.communicator import MpiCommunicator
from dspark_trt.runtime_py.watchdog import Watchdog


def main(phase: str) -> None:
    communicator = MpiCommunicator()
    with Watchdog(communicator.rank, communicator.abort, timeout_s=1, grace_s=5) as watchdog:
        communicator.barrier()
        with watchdog.operation(phase):
            watchdog.enqueued(f"the work of rank {communicator.rank}")
            if communicator.rank == 1:
                time.sleep(600)
            communicator.all_gather_object(None)


if __name__ == "__main__":
    main(sys.argv[1])
