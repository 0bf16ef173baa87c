"""A job of ranks that decode on table models, each in a random state of its own; rank 0 reports as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from dspark_trt.runtime_py.acceptance import HeadAcceptance
from dspark_trt.runtime_py.communicator import Communicator, MpiCommunicator, fail_together
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.decoder import Execution
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.scheduling import EarlyStop
from dspark_trt.runtime_py.verification import BlockVerification, Verifier
from torch import Tensor

from tests.fakes import TableDraft, Tables, TableTarget, table_decoder

REQUESTS, TOKENS = 3000, 100


class Disturbance:
    """Consumes global random numbers, other ones on each rank."""

    def __init__(self, rank: int):
        self.rank = rank

    def disturb(self) -> None:
        torch.rand(self.rank + 1), np.random.rand(self.rank), [random.random() for _ in range(self.rank)]


class Draft(TableDraft):
    def __init__(self, tables: Tables, rank: int):
        super().__init__(tables, sampling=True)
        self.disturb = Disturbance(rank).disturb

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.disturb()
        super().run(inputs, outputs)


class TiltedTarget(TableTarget):
    """All tokens are tied, and on rank 1 an ulp decides otherwise."""

    def __init__(self, tables: Tables, rank: int):
        super().__init__(tables)
        self.rank = rank

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        super().run(inputs, outputs)
        outputs["logits"].fill_(1.0)
        outputs["logits"][:, 3] += self.rank * 2.0**-23


def params(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=TOKENS,
        temperature=(0.0, 0.7, 1.3, 1.0)[i % 4],
        top_p=0.9 if i % 16 == 2 else 1.0,
        seed=i if i % 2 else None,
        num_draft_tokens=2 if i % 5 == 0 else None,
    )


def lockstep(communicator: Communicator) -> dict[str, object]:
    """Many tokens, every decision compared."""
    tables = Tables.random(9, 5, seed=communicator.size)
    loop = table_decoder(
        tables,
        slots=REQUESTS,
        draft=Draft(tables, communicator.rank),
        communicator=communicator,
        verifier=Verifier(BlockVerification()),
        check_lockstep=True,
    )
    costs = CostTable({REQUESTS: 0.0}, {n: 1000.0 + n for n in range(1, 6 * REQUESTS + 1)})
    loop.scheduler = EarlyStop(HeadAcceptance(), costs)
    done, stats = loop.generate([[i % 9] for i in range(REQUESTS)], [params(i) for i in range(REQUESTS)])
    texts = communicator.all_gather_object([c.token_ids for c in done])
    return {"tokens": sum(map(len, texts[0])), "equal": all(t == texts[0] for t in texts), "steps": stats.draft_calls}


def unlike(communicator: Communicator) -> dict[str, object]:
    """Ranks whose logits differ: rank 0's tokens on all, or an error on all, as on the device always."""
    tables = Tables.random(9, 5)
    target = TiltedTarget(tables, communicator.rank)
    loop = table_decoder(tables, target=target, communicator=communicator)
    done, _ = loop.generate([[0], [1]], SamplingParams(max_tokens=200, stop_token_ids=[3]))
    texts = communicator.all_gather_object([c.token_ids for c in done])
    report: dict[str, object] = {"unlike_equal": all(t == texts[0] for t in texts), "unlike_tokens": texts[0]}
    checks: dict[str, dict[str, Any]] = {
        "errors": {"check_lockstep": True},
        "device_errors": {"execution": Execution(steps="device")},
    }
    for name, options in checks.items():
        checked = table_decoder(tables, target=target, communicator=communicator, **options)
        try:
            checked.generate([[0]], SamplingParams(max_tokens=9))
            error = ""
        except RuntimeError as caught:
            error = str(caught)
        report[name] = communicator.all_gather_object(error)
    return report


def main() -> None:
    torch.set_num_threads(1)
    communicator = MpiCommunicator()
    with fail_together(communicator, debug=True):
        report = {**lockstep(communicator), **unlike(communicator)}
    if communicator.rank == 0:
        json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
