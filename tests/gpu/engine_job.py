"""One rank of a tensor-parallel job: target and draft engines on this rank's GPU, the mailbox between the ranks;
where there are fewer GPUs than ranks, they share.

    mpirun -n 2 python -m tests.gpu.engine_job ENGINES REFERENCES DTYPE GPUS

Rank 0 prints a report as JSON: how near the engines are to a single rank in torch, whether both ranks have the same
bits, and whether replayed steps have the bits of eager ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.plugins import tensorrt_api
from dspark_trt.runtime_py.communicator import MpiCommunicator, fail_together
from dspark_trt.runtime_py.cuda_graphs import GraphPool
from dspark_trt.runtime_py.mailbox import Mailbox
from dspark_trt.runtime_py.tensorrt_session import TensorRTSession, open_session

from tests.gpu.engine_calls import distances, run_calls
from tests.gpu.test_tensorrt_engines import KINDS, Step


def main(engines: Path, references: Path, dtype: str, gpus: int) -> None:
    communicator = MpiCommunicator()
    with fail_together(communicator, debug=True):
        rank = communicator.rank
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        api = tensorrt_api.load("tensorrt")
        directory = EngineDir.open(engines)
        mailbox = Mailbox.create(communicator, directory.draft.hidden_size, getattr(torch, dtype), device)
        sessions = {
            kind: open_session(directory, kind, rank, api, world_size=communicator.size, mailbox=mailbox.tensor)
            for kind in KINDS
        }
        report: dict[str, object] = {}
        identical = True
        for kind in KINDS:
            inputs, on_gpu, _ = torch.load(references / f"{kind}_{dtype}.pt", weights_only=True)
            found = run_calls(sessions[kind], inputs, device)
            mailbox.check()
            report[kind] = distances(found, on_gpu)
            everyone = communicator.all_gather_object([{n: t.numpy() for n, t in call.items()} for call in found])
            identical &= all(
                (one[name] == other[name]).all()
                for one, other in zip(everyone[0], everyone[1], strict=True)
                for name in one
            )
        report["ranks_identical"] = bool(identical)
        report["replays_identical"] = _replays_identical(sessions, directory, device)
        mailbox.check()
        communicator.barrier()
        if rank == 0:
            print(json.dumps(report), flush=True)
        mailbox.close()


def _replays_identical(sessions: dict[str, TensorRTSession], directory: EngineDir, device: torch.device) -> bool:
    stream, same = torch.cuda.Stream(device), True
    with torch.cuda.stream(stream):
        step = Step(sessions["target"], sessions["draft"], 2, directory.draft.block_size)
        step(), step()
        replay = GraphPool(stream).capture(step, "a step of 2")
        for seed in range(50):
            step.reset(seed)
            replay()
            replayed = step.results()
            step.reset(seed)
            step()
            same &= all(torch.equal(one, other) for one, other in zip(replayed, step.results(), strict=True))
    stream.synchronize()
    return same


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
