"""A job of ranks that decodes the recorded prompts; rank 0 reports as JSON.

mpirun -n 2 python -m tests.gpu.decode_job ENGINES TOKENS BACKEND GPUS
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import connect, fail_together
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.watchdog import Watchdog

from tests import greedy_reference
from tests.gpu.gpus import ranks_on


def main(engines: Path, tokens: int, backend: Backend, gpus: int) -> None:
    directory = EngineDir.open(engines)
    communicator = connect(directory.tp_size)
    with (
        ranks_on(gpus),
        fail_together(communicator),
        Watchdog(communicator.rank, communicator.abort, timeout_s=60) as watchdog,
    ):
        with Decoder.from_dir(
            engines,
            communicator=communicator,
            device="cuda",
            backend=backend,
            check_lockstep=True,
            progress=watchdog,
        ) as decoder:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            done, stats = decoder.generate(greedy_reference.prompts(), params)
        found = [completion.token_ids for completion in done]
        assert all(other == found for other in communicator.all_gather_object(found)), "the ranks' tokens differ"
        if communicator.rank == 0:
            print(json.dumps({"tokens": found, "stats": dataclasses.asdict(stats)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "tensorrt" if sys.argv[3] == "tensorrt" else "torch", int(sys.argv[4]))
