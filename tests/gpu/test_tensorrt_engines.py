"""Engines of the trained tiny models, built and run by enterprise TensorRT on this GPU, our kernels inside.

The references are torch sessions: on the CPU, and on this GPU with the same kernels. Between these two only the
order of sums in matrix products differs and, in float16, where a sum is rounded; so does it between them and an
engine. The distance of the two is measured in every run, and an engine may be four times as far from the one on the
GPU, and a few roundings of its type farther. A row may be far off where a routed expert's score is a near tie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dspark_trt.builder.build_config import Kind, Lowering
from dspark_trt.builder.checkpoint import read_shard_config
from dspark_trt.builder.engine import build_engine, dimension_ranges, profiles_for
from dspark_trt.builder.network import load_network
from dspark_trt.builder.onnx_export import export_network
from dspark_trt.plugins.kernels import kernel_scope
from dspark_trt.plugins.tensorrt_api import EngineBuildError, TensorRT
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.cuda_graphs import GraphError, GraphPool
from dspark_trt.runtime_py.session import SessionError, TorchSession, make_caches, make_outputs
from dspark_trt.runtime_py.tensorrt_session import TensorRTSession, open_session
from torch import Tensor

from tests.gpu import engine_calls
from tests.gpu.engine_calls import DTYPES, Open, Outputs, build_config, check_tokens, distances, run_calls
from tests.gpu.gpus import over_gpus
from tests.mpi_jobs import run_job

KINDS: tuple[Kind, ...] = ("target", "draft")
FARTHEST_ROW = {"float32": 1e-4, "float16": 0.5}
"""In float16 the rounding of a row's scores may flip a routed expert, which is not noise, and still its own row."""


@pytest.fixture(scope="module")
def references(
    shards: Callable[[int], Path],
) -> Callable[[Kind, str], tuple[list[Outputs], list[Outputs], list[Outputs]]]:
    """Inputs of the calls, outputs of torch with kernels on the GPU, outputs of torch on the CPU."""
    made: dict[tuple[str, str], tuple[list[Outputs], list[Outputs], list[Outputs]]] = {}

    def make(kind: Kind, dtype: str) -> tuple[list[Outputs], list[Outputs], list[Outputs]]:
        if (kind, dtype) not in made:
            one = shards(1)
            draft = read_shard_config(one).draft
            network = load_network(kind, one, 0, build_config(dtype).checked(draft))
            if kind == "target":
                inputs = engine_calls.target_inputs(draft.block_size)
            else:
                features = [outputs["target_features"] for outputs in make("target", dtype)[2]]
                inputs = engine_calls.draft_inputs(draft.block_size, features)
            on_cpu = run_calls(TorchSession(network, SingleProcess()), inputs, "cpu")
            on_gpu = run_calls(TorchSession(network.cuda(), SingleProcess(), scope=kernel_scope), inputs, "cuda")
            made[kind, dtype] = inputs, on_gpu, on_cpu
        return made[kind, dtype]

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_agrees_with_torch(
    api: TensorRT, tensorrt_engines: Open, references: Callable[..., tuple[list[Outputs], ...]], kind: Kind, dtype: str
) -> None:
    """Prefill, steps, padding and shuffled slots, through both profiles; every plugin layer was really built."""
    inputs, on_gpu, on_cpu = references(kind, dtype)
    session = open_session(tensorrt_engines(dtype, 1), kind, 0, api)
    found = run_calls(session, inputs, "cuda")
    spread, distance = distances(on_cpu, on_gpu), distances(found, on_gpu)
    rounding = 8 * torch.finfo(getattr(torch, dtype)).eps
    print(f"{kind} {dtype}, {api}: torch CPU from GPU {spread}, engine from GPU {distance}")
    for name, (most, farthest) in distance.items():
        assert most <= 4 * spread[name][0] + rounding, name
        assert farthest <= FARTHEST_ROW[dtype], name
    if kind == "draft":
        different, total = check_tokens(found, on_gpu)
        assert different <= (0 if dtype == "float32" else total // 20)


class Step:
    """Target and draft engines one after the other, on static tensors of ``requests`` requests."""

    def __init__(self, target: TensorRTSession, draft: TensorRTSession, requests: int, block: int):
        self.sessions = {"target": target, "draft": draft}
        rows = requests * (block + 1)
        self.slots = torch.arange(requests, dtype=torch.int32, device="cuda")
        starts = 20 + 3 * self.slots
        offsets = torch.arange(block + 1, dtype=torch.int32, device="cuda")
        row_slots = self.slots.repeat_interleave(block + 1)
        positions = (starts.unsqueeze(1) + offsets).flatten()
        ids = torch.randint(0, 256, (rows,), dtype=torch.int32, device="cuda")
        self.rings = {kind: make_caches(session, "cuda") for kind, session in self.sessions.items()}
        self.inputs: dict[str, dict[str, Tensor]] = {
            "target": {"input_ids": ids, "positions": positions, "slots": row_slots.contiguous()}
        }
        self.outputs = {"target": self._outputs("target")}
        self.inputs["draft"] = {
            "anchor_ids": ids[:requests].clone(),
            "positions": starts + block + 1,
            "slots": self.slots,
            "feature_positions": positions.clone(),
            "feature_slots": row_slots.clone(),
            "target_features": self.outputs["target"]["target_features"],
            "temperature": torch.zeros(requests, device="cuda"),
            "seeds": torch.zeros(requests, 2, dtype=torch.int32, device="cuda"),
        }
        self.outputs["draft"] = self._outputs("draft")

    def _outputs(self, kind: str) -> dict[str, Tensor]:
        return make_outputs(self.sessions[kind], {**self.inputs[kind], **self.rings[kind]}, self.rings[kind])

    def __call__(self) -> None:
        for kind, session in self.sessions.items():
            session.run({**self.inputs[kind], **self.rings[kind]}, self.outputs[kind])

    def reset(self, seed: int) -> None:
        """New tokens in the same memory, and empty caches."""
        generator = torch.Generator("cuda").manual_seed(seed)
        ids = self.inputs["target"]["input_ids"]
        ids.copy_(torch.randint(0, 256, ids.shape, dtype=torch.int32, device="cuda", generator=generator))
        self.inputs["draft"]["anchor_ids"].copy_(ids[: len(self.slots)])
        for rings in self.rings.values():
            for ring in rings.values():
                ring.zero_()

    def results(self) -> list[Tensor]:
        return [tensor.clone() for outputs in self.outputs.values() for tensor in outputs.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_equals_eager(api: TensorRT, tensorrt_engines: Open, dtype: str) -> None:
    """GR-1, GR-3, GR-8: a graph for each request count, replayed in turn, eager calls of other shapes in between."""
    directory = tensorrt_engines(dtype, 1)
    block = directory.draft.block_size
    target, draft = open_session(directory, "target", 0, api), open_session(directory, "draft", 0, api)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pool = GraphPool(stream)
        steps = {n: Step(target, draft, n, block) for n in range(1, engine_calls.BATCH + 1)}
        replays = {}
        for n, step in steps.items():
            step(), step()
            replays[n] = pool.capture(step, f"a step of {n}")
        eager = {
            n: Step(open_session(directory, "target", 0, api), open_session(directory, "draft", 0, api), n, block)
            for n in steps
        }
        prefill = engine_calls.target_inputs(block)[0]
        rings = make_caches(target, "cuda")
        for seed in range(20):
            for n in (2, 1, 3, 3):
                for step in (steps[n], eager[n]):
                    step.reset(seed)
                replays[n](), replays[n]()
                eager[n](), eager[n]()
                pairs = zip(steps[n].results(), eager[n].results(), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), (seed, n)
            # An eager call of the other profile must leave what graphs use alone.
            tensors = {**{name: value.cuda() for name, value in prefill.items()}, **rings}
            target.run(tensors, make_outputs(target, tensors, rings))
    stream.synchronize()


@pytest.mark.gpu
def test_a_capture_without_a_call_first_is_refused(api: TensorRT, tensorrt_engines: Open) -> None:
    """GR-2, GR-3: the capture ends, the reason is said, and the next eager call works."""
    directory = tensorrt_engines("float32", 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        target, draft = open_session(directory, "target", 0, api), open_session(directory, "draft", 0, api)
        step = Step(target, draft, 1, directory.draft.block_size)
        with pytest.raises(GraphError, match="can't be captured; run it once outside of a capture"):
            GraphPool(stream).capture(step, "a cold step")
        step()
        step()
        GraphPool(stream).capture(step, "a warm step")()
    stream.synchronize()


@pytest.mark.gpu
def test_two_addresses_for_one_cache_are_refused(api: TensorRT, tensorrt_engines: Open) -> None:
    """ENG-5."""
    directory = tensorrt_engines("float32", 1)
    session = open_session(directory, "target", 0, api)
    caches = make_caches(session, "cuda")
    tensors = {**{n: v.cuda() for n, v in engine_calls.target_inputs(directory.draft.block_size)[0].items()}, **caches}
    outputs = make_outputs(session, tensors, caches)
    outputs["kv_ring_0_out"] = outputs["kv_ring_0_out"].clone()
    with pytest.raises(SessionError, match="kv_ring_0_out must be bound to the tensor of kv_ring_0"):
        session.run(tensors, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_lowering_as_far_as_the_compiler_goes(
    api: TensorRT,
    shards: Callable[[int], Path],
    tmp_path: Path,
    references: Callable[..., tuple[list[Outputs], ...]],
    kind: Kind,
) -> None:
    """No plugin. TensorRT 8.6's compiler takes a chain between two matrix products for attention and gives up."""
    source = shards(1)
    config = read_shard_config(source).draft
    build = build_config("float32", lowering=Lowering.NATIVE, sampling=False).checked(config)
    model = export_network(load_network(kind, source, 0, build), tmp_path / f"native_{kind}.onnx")
    try:
        plan = build_engine(
            model.path,
            api=api,
            lowering=Lowering.NATIVE,
            profiles=profiles_for(model.inputs, dimension_ranges(kind, config, build)),
            expected_plugin_layers={},
        )
    except EngineBuildError as error:
        if not (api.is_8 and kind == "target"):  # its draft builds, and must go on doing so
            raise
        pytest.xfail(f"{api} can't build the {kind} natively: {error}")
    network = load_network(kind, source, 0, build)
    session = TensorRTSession(api, api.deserialize(plan), network.io, name=f"native {kind}")
    inputs, on_gpu, on_cpu = references(kind, "float32")
    names = {info.name for info in network.io.inputs}
    inputs = [{name: value for name, value in call.items() if name in names} for call in inputs]
    found = run_calls(session, inputs, "cuda")
    wanted = [{name: value for name, value in w.items() if name in f} for w, f in zip(on_gpu, found, strict=True)]
    other = [{name: value for name, value in w.items() if name in f} for w, f in zip(on_cpu, found, strict=True)]
    spread, distance = distances(other, wanted), distances(found, wanted)
    for name, (most, _) in distance.items():
        assert most <= 4 * spread[name][0] + 8 * torch.finfo(torch.float32).eps, name


@over_gpus
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_reduce_inside_their_engines(
    tensorrt_engines: Open, tmp_path: Path, references: Callable[..., tuple[list[Outputs], ...]], dtype: str, gpus: int
) -> None:
    """Under mpirun: the mailbox is an input of the engines; eager and captured, bit-equal on both."""
    directory = tensorrt_engines(dtype, 2)
    for kind in KINDS:
        torch.save(references(kind, dtype), tmp_path / f"{kind}_{dtype}.pt")
    job = run_job(2, "-m", "tests.gpu.engine_job", directory.path, tmp_path, dtype, str(gpus), timeout=300)
    assert job.status == 0, job.out + job.err
    report = json.loads(job.out.splitlines()[-1])
    print(report)
    assert report["ranks_identical"] and report["replays_identical"]
    rounding = 8 * torch.finfo(getattr(torch, dtype)).eps
    for kind in KINDS:
        _, on_gpu, on_cpu = references(kind, dtype)
        spread = distances(on_cpu, on_gpu)
        for name, (most, farthest) in report[kind].items():
            # Two partial sums instead of one: another order of summation, and in float16 two roundings more.
            assert most <= 4 * spread[name][0] + 2 * rounding, (kind, name)
            assert farthest <= FARTHEST_ROW[dtype], (kind, name)
