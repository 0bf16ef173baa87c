"""A job of ranks that decodes the recorded prompts, with one backend after the other; rank 0 reports as JSON.

mpirun -n 2 python -m tests.gpu.decode_job ENGINES TOKENS GPUS BACKEND [BACKEND]

Of two backends, the report also says how far the first one's logits lie from the second's, and where texts part.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dspark_trt.builder.engine_dir import EngineDir
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import connect, fail_together
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams, Statistics
from dspark_trt.runtime_py.watchdog import Watchdog

from tests import greedy_reference
from tests.gpu.gpus import ranks_on


def main(engines: Path, tokens: int, gpus: int, backends: Sequence[Backend]) -> None:
    directory = EngineDir.open(engines)
    communicator = connect(directory.tp_size)
    texts: list[list[list[int]]] = []
    stats: list[Statistics] = []
    with (
        ranks_on(gpus),
        fail_together(communicator),
        Watchdog(communicator.rank, communicator.abort, timeout_s=60) as watchdog,
    ):
        options: dict[str, Any] = {"communicator": communicator, "device": "cuda"}
        for backend in backends:
            checked = {"check_lockstep": True, "progress": watchdog}
            with Decoder.from_dir(engines, backend=backend, **checked, **options) as decoder:
                params = SamplingParams(max_tokens=tokens, ignore_eos=True)
                done, counted = decoder.generate(greedy_reference.prompts(), params)
            found = [completion.token_ids for completion in done]
            assert all(other == found for other in communicator.all_gather_object(found)), "the ranks' tokens differ"
            texts.append(found)
            stats.append(counted)
        report: dict[str, Any] = {"tokens": texts, "stats": [dataclasses.asdict(counted) for counted in stats]}
        if len(backends) > 1:
            views = [partial(greedy_reference.forced_logits, engines, backend=b, **options) for b in backends]
            distance, parted = greedy_reference.compare_texts(*texts, *views)
            report |= {"distance": distance, "parted": [dataclasses.asdict(divergence) for divergence in parted]}
        if communicator.rank == 0:
            print(json.dumps(report))


if __name__ == "__main__":
    chosen: list[Backend] = ["tensorrt" if name == "tensorrt" else "torch" for name in sys.argv[4:]]
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), chosen)
