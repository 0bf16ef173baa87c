"""The decode loop over engines: target and draft replayed in turn on one stream of each rank, as the torch sessions."""

from __future__ import annotations

import json

import pytest
from dspark_trt.plugins.tensorrt_api import TensorRT
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams

from tests import greedy_reference
from tests.gpu.engine_calls import DTYPES, Open
from tests.gpu.gpus import over_gpus
from tests.greedy_reference import Divergence, View
from tests.mpi_jobs import run_job

TOKENS = 100
SAME = {"float32": 19, "float16": 15}
"""Prompts of 20 that must have the same tokens. Engines sum in another order than torch's matrix products; where that
turns a near tie, the rest of the text differs. That it was one is asserted."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loop_decodes_what_torch_decodes(api: TensorRT, tensorrt_engines: Open, dtype: str) -> None:
    """Captured steps of both engines, 1 to 8 requests in flight; plain host steps give the same once more."""
    engines = tensorrt_engines(dtype, 1).path
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def tokens(backend: Backend, *, host: bool = False) -> list[list[int]]:
        with Decoder.from_dir(engines, device="cuda", backend=backend) as decoder:
            if host:
                decoder.interleaver = None
            done, stats = decoder.generate(greedy_reference.prompts(), params)
        assert (stats.device_steps == 0) == host
        return [completion.token_ids for completion in done]

    found, wanted = tokens("tensorrt"), tokens("torch")
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    print(f"{dtype}, {api}: {same} of {len(found)} prompts are identical to torch's")
    assert same >= SAME[dtype]
    engine, torch = View(engines, "cuda", "tensorrt"), View(engines, "cuda", "torch")
    distance, parted = greedy_reference.compare_texts(found, wanted, engine, torch)
    check_where_texts_part(dtype, distance, parted)
    assert sum(a == b for a, b in zip(tokens("tensorrt", host=True), found, strict=True)) >= SAME[dtype]


@over_gpus
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_decode_with_engines(api: TensorRT, tensorrt_engines: Open, dtype: str, gpus: int) -> None:
    """Under mpirun, the mailbox inside the engines, every decision compared between the ranks."""
    engines = tensorrt_engines(dtype, 2).path
    backends = ("tensorrt", "torch")
    job = run_job(2, "-m", "tests.gpu.decode_job", engines, str(TOKENS), str(gpus), *backends, timeout=300)
    assert job.status == 0, job.err
    report = json.loads(job.out.splitlines()[-1])
    assert all(stats["device_steps"] > 0 for stats in report["stats"])
    found, wanted = report["tokens"]
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    print(f"{dtype}, {api}: {same} of {len(wanted)} prompts are identical to torch's, {gpus} GPU(s)")
    assert same >= SAME[dtype]
    check_where_texts_part(dtype, report["distance"], [Divergence(**parted) for parted in report["parted"]])


def check_where_texts_part(dtype: str, distance: dict[str, float], parted: list[Divergence]) -> None:
    """Two texts may part where the engine's logits and torch's turn a near tie, by no more than they differ."""
    print(f"{dtype}: logits differ by {distance}; texts part at {parted}")
    roundings = sorted(divergence.rounding for divergence in parted)
    # A margin is of two logits.
    assert all(rounding <= 2 * distance["largest"] for rounding in roundings), parted
    # The largest distance is of a position where rounding turned the choice of an expert. It is dozens of times what
    # rounding does elsewhere, and would excuse any text. Fewer than one position in a hundred is like that, and which
    # is not known here, so one text may part at one. The others part by rounding alone: the quantile is a root mean
    # square that 99 % of the positions stay below, and two logits that are each twice as far make four of it.
    assert all(rounding <= 4 * distance["ninety-nine hundredths"] for rounding in roundings[:-1]), parted
