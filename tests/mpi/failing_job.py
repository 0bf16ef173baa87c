"""examples/run.py as a job whose rank 1 fails.

mpirun -n 2 python -m tests.mpi.failing_job WHERE HOW ENGINES

WHERE is load (of the draft), capture (of the steps, which a CPU runs as they are) or step (the seventh); HOW is raise,
kill or hang.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dspark_trt.builder.checkpoint import CheckpointError
from dspark_trt.runtime_py import opening, verification
from dspark_trt.runtime_py.communicator import MpiCommunicator
from dspark_trt.runtime_py.decoder import Decoder, Execution

from tests.example_scripts import load_example

ERRORS = {
    "load": CheckpointError("the disk went away"),
    "capture": RuntimeError("the capture failed"),
    "step": RuntimeError("the seventh step failed"),
}


def fail(where: str, how: str) -> None:
    print(f"failing at {time.time()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)
    raise ERRORS[where]


class Pool:
    """Captures nothing; a replay is the call itself."""

    def __init__(self, failing: Callable[[], None]):
        self._failing = failing

    def capture(self, call: Callable[[], None], name: str) -> Callable[[], None]:
        self._failing()
        return call


def capture(failing: Callable[[], None], decoder: Decoder) -> None:
    """The captures of a GPU, before the decoder is handed out."""
    assert decoder.interleaver
    decoder.interleaver._pool = Pool(failing)  # type: ignore[assignment]
    with torch.inference_mode():
        decoder.interleaver.capture(sampled=False)


def main(where: str, how: str, engines: str) -> int:
    chosen = MpiCommunicator().rank == 1
    load, verify, steps = opening.load_network, verification.verify_greedy, 0

    def failing_load(kind: Any, *rest: Any, **options: Any) -> Any:
        if kind == "draft":
            fail(where, how)
        return load(kind, *rest, **options)

    def failing_verify(drafts: Any, logits: Any) -> Any:
        nonlocal steps
        steps += drafts.shape[1] > 0
        if steps == 7:
            fail(where, how)
        return verify(drafts, logits)

    if where == "capture":
        opening.Execution = partial(Execution, steps="device")  # type: ignore[misc, assignment]
        failing = partial(fail, where, how) if chosen else (lambda: None)
        Decoder.capture = lambda decoder: capture(failing, decoder)  # type: ignore[method-assign]
    elif chosen and where == "load":
        opening.load_network = failing_load
    elif chosen:
        verification.verify_greedy = failing_verify
    options = ["--prompt", "It was", "--max-output-len", "64", "--timeout", "3" if how == "hang" else "100"]
    return int(load_example("run").main(["--engine-dir", engines, *options]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
