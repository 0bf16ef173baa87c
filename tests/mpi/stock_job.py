"""A job of two ranks that run a target with every kind of boundary; rank 0 reports as JSON.

mpirun -n 2 python -m tests.mpi.stock_job ENGINE_DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from dspark_trt.builder.engine_dir import WEIGHTS, EngineDir
from dspark_trt.builder.network import load_network
from dspark_trt.runtime_py.boundary import Facts, plan
from dspark_trt.runtime_py.communicator import Communicator, MpiCommunicator, fail_together
from dspark_trt.runtime_py.session import TorchSession, make_caches, make_outputs
from dspark_trt.runtime_py.stock import DistributedGroup, boundary_scope, open_group
from torch import Tensor

CPU = torch.device("cpu")
Scope = Callable[[], AbstractContextManager[None]]


def outputs_of(directory: EngineDir, communicator: Communicator, scope: Scope) -> list[Tensor]:
    """Logits, features and rings of one call of twelve rows."""
    network = load_network("target", directory.path / WEIGHTS, communicator.rank, directory.build)
    session = TorchSession(network, communicator, scope=scope)
    rows = torch.arange(12, dtype=torch.int32)
    caches = make_caches(session)
    inputs = {"input_ids": rows * 5 % 90, "positions": rows, "slots": torch.zeros_like(rows), **caches}
    outputs = make_outputs(session, inputs, caches)
    session.run(inputs, outputs)
    return [outputs[o.name] for o in session.io.outputs]


def job(path: Path, communicator: Communicator) -> dict[str, object]:
    rank, directory = communicator.rank, EngineDir.open(path)
    # Only rank 1 knows that there is no mailbox.
    facts = Facts.gather(communicator, torch.bfloat16, "no peer access" if rank else "")
    reason = plan(12, facts).reason
    gathered = open_group(communicator, CPU)
    group = DistributedGroup(communicator, CPU, backend="gloo", timeout_s=60)

    generator = torch.Generator().manual_seed(rank)
    sums, inputs = [], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs.append((torch.randn(7, 33, generator=generator) * 3).to(dtype))
        sums.append((group.all_reduce(inputs[-1]), gathered.all_reduce(inputs[-1])))
    sent = torch.arange(24, dtype=torch.int32).view(4, 3, 2).permute(2, 0, 1) + 1000 * rank
    moved = [(group.all_gather(sent), gathered.all_gather(sent)), (group.all_to_all(sent), gathered.all_to_all(sent))]

    reference = outputs_of(directory, communicator, nullcontext)
    kinds = {"gathered": gathered.all_reduce, "distributed": group.all_reduce}
    equal = {}
    for name, all_reduce in kinds.items():
        found = outputs_of(directory, communicator, partial(boundary_scope, facts, all_reduce))
        equal[name] = all(torch.equal(f, r) for f, r in zip(found, reference, strict=True))
    group.close()
    own = {
        "reason": reason,
        "sums": [torch.equal(a, b) for a, b in sums],
        "moved": [torch.equal(a, b) for a, b in moved] + [moved[1][0][:, 0, 0].tolist() == [rank, 1000 + rank]],
        "dtypes": [str(a.dtype) for a, _ in sums],
        "bits": [float(a.double().sum()) for a, _ in sums],
        "equal": equal,
        "finite": bool(reference[0].isfinite().all()),
    }
    everyone = communicator.all_gather_object(own)
    return {"ranks": everyone}


if __name__ == "__main__":
    world = MpiCommunicator()
    with fail_together(world, debug=True):
        report = job(Path(sys.argv[1]), world)
        if world.rank == 0:
            print(json.dumps(report))
