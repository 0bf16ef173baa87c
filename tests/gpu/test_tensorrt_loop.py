"""The decode loop over engines: target and draft replayed in turn on one stream of each rank, as the torch sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspark_trt.builder.engine_dir import build_engine_dir
from dspark_trt.plugins.tensorrt_api import TensorRT
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams

from tests import greedy_reference
from tests.gpu.engine_calls import build_config, convert_tiny
from tests.gpu.test_tensorrt_engines import DTYPES, api
from tests.mpi_jobs import run_job

__all__ = ["api"]
TOKENS = 100
SAME = {"float32": 19, "float16": 15}
"""Prompts of 20 that must have the same tokens. Engines sum in another order than torch's matrix products; where that
turns a near tie, the rest of the text differs."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loop_decodes_what_torch_decodes(api: TensorRT, dtype: str, tmp_path: Path) -> None:
    """Captured steps of both engines, 1 to 8 requests in flight; plain host steps give the same once more."""
    build = build_config(dtype, max_batch_size=8)
    engines = build_engine_dir(convert_tiny(tmp_path, 1), tmp_path / "engines", build, api=api).path
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
    assert sum(a == b for a, b in zip(tokens("tensorrt", host=True), found, strict=True)) >= SAME[dtype]


@pytest.mark.gpu2
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_decode_with_engines(api: TensorRT, dtype: str, tmp_path: Path) -> None:
    """Under mpirun, the mailbox inside the engines, every decision compared between the ranks."""
    build = build_config(dtype, max_batch_size=8)
    engines = build_engine_dir(convert_tiny(tmp_path, 2), tmp_path / "engines", build, api=api).path
    found = {}
    for backend in ("tensorrt", "torch"):
        job = run_job(2, "-m", "tests.gpu.decode_job", engines, str(TOKENS), backend, timeout=200)
        assert job.status == 0, job.err
        report = json.loads(job.out.splitlines()[-1])
        assert report["stats"]["device_steps"] > 0
        found[backend] = report["tokens"]
    same = sum(a == b for a, b in zip(found["tensorrt"], found["torch"], strict=True))
    print(f"{dtype}, {api}: {same} of {len(found['torch'])} prompts are identical to torch's on two GPUs")
    assert same >= SAME[dtype]
