"""The decode loop on one GPU: replayed steps against enqueued ones, and against the CPU."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from dspark_trt.plugins.op import executor_scope
from dspark_trt.runtime_py.cuda_graphs import GraphError, GraphPool
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.requests import SamplingParams, Statistics
from dspark_trt.runtime_py.side_stream import SideStream
from dspark_trt.runtime_py.verification import BlockVerification, Verifier

from tests import greedy_reference
from tests.gpu.timeline import idle_between, profile, replays, waiting_calls
from tests.op_examples import example
from tests.placeholder_engines import make_engines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUMERICS = {
    "released": {"numerics": "released", "dtype": "bfloat16"},
    "float32": {"numerics": "dequantized", "dtype": "float32"},
    "float16": {"numerics": "dequantized", "dtype": "float16"},
    "bfloat16": {"numerics": "dequantized", "dtype": "bfloat16"},
}
Open = Callable[..., Decoder]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def engines(root: Path) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(**build: Any) -> Path:
        key = repr(sorted(build.items()))
        if key not in made:
            made[key] = make_engines(root, 1, **build)
        return made[key]

    return make


def decode(
    engines: Path, prompts: Sequence[Sequence[int]], params: Any, **options: Any
) -> tuple[list[list[int]], Statistics, list[torch.Tensor]]:
    """Tokens, statistics, and the rings as the run left them."""
    with Decoder.from_dir(engines, device="cuda", **options) as decoder:
        done, stats = decoder.generate(prompts, params)
        rings = [ring.clone() for caches in decoder._host.rings for ring in caches.values()]
    return [c.token_ids for c in done], stats, rings


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("requests", [1, 2, 3, 8])
def test_replayed_steps_equal_enqueued_ones(engines: Callable[..., Path], numerics: str, requests: int) -> None:
    """GR-1: bit-equal, caches included, with more prompts than slots and so after rejections of every length."""
    made = engines(**NUMERICS[numerics], max_batch_size=requests, max_seq_len=200)
    prompts = greedy_reference.prompts()[: 2 * requests + 1]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    # Three requests run in a step of three, or padded in one of four.
    captured, stats, rings = decode(made, prompts, params, request_counts=(1, 2, 4, 8))
    eager, _, wanted = decode(made, prompts, params, request_counts=())
    assert captured == eager
    assert stats.device_steps > 0
    assert all(torch.equal(a, b) for a, b in zip(rings, wanted, strict=True))
    assert len(set(stats.accepted_per_position)) > 1, "drafts of all positions were kept equally often"


@pytest.mark.parametrize("requests", [1, 3])
def test_a_target_alone_replays_what_it_enqueues(engines: Callable[..., Path], requests: int) -> None:
    """What speculation is compared with is captured as well."""
    made = engines(**NUMERICS["float32"], max_batch_size=requests, max_seq_len=200)
    prompts = greedy_reference.prompts()[: 2 * requests + 1]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    captured, stats, rings = decode(made, prompts, params, speculative=False, request_counts=(1, 4))
    eager, _, wanted = decode(made, prompts, params, speculative=False, request_counts=())
    assert captured == eager and stats.device_steps > 0 and stats.draft_calls == 0
    assert all(torch.equal(a, b) for a, b in zip(rings, wanted, strict=True))


@pytest.mark.parametrize("method", [None, BlockVerification()])
def test_sampled_steps_replay(engines: Callable[..., Path], method: Any) -> None:
    made = engines(**NUMERICS["float32"], max_batch_size=4, max_seq_len=200, sampling=True)
    prompts = greedy_reference.prompts()[:7]
    params = [SamplingParams(max_tokens=60, temperature=i % 3 / 2, seed=i, ignore_eos=True) for i in range(7)]
    options = {"verifier": Verifier(method)} if method else {}
    captured, stats, _ = decode(made, prompts, params, **options)
    assert captured == decode(made, prompts, params, request_counts=(), **options)[0]
    assert stats.device_steps > 0


def test_the_side_stream_changes_nothing(engines: Callable[..., Path]) -> None:
    made = engines(**NUMERICS["bfloat16"], max_batch_size=4, max_seq_len=200)
    prompts, params = greedy_reference.prompts()[:6], SamplingParams(max_tokens=60, ignore_eos=True)
    with_side, without = (decode(made, prompts, params, side_stream=side) for side in (True, False))
    assert with_side[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(with_side[2], without[2], strict=True))


@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_tokens_are_those_of_the_cpu(root: Path, mode: str) -> None:
    """20 prompts of 200 tokens. In float32 all are equal, or nearly tied where one is not. Released weights round
    activations to 4 bits behind every layer, and one flipped code can turn an expert: logits are then no farther
    from the CPU's than those of a CPU that rounds attention against other maxima, at every quantile (a quarter
    more for the noise of 800 positions), and no two tokens that part the texts farther than its farthest logits."""
    made = make_engines(root, 1, **greedy_reference.build_options(mode))
    params = SamplingParams(max_tokens=greedy_reference.TOKENS, ignore_eos=True)
    found, stats, _ = decode(made, greedy_reference.prompts(), params)
    assert stats.tokens_per_step > 2
    distance, spread = greedy_reference.distance_to_cpu(made, mode, "cuda"), greedy_reference.recorded_spread(mode)
    different = greedy_reference.divergences(made, mode, found, "cuda")
    print(f"{mode}: {len(found) - len(different)} of {len(found)} prompts are identical; {different}")
    print(f"{mode}: distance from the CPU {distance}; of a CPU that rounds elsewhere {spread}")
    for divergence in different:
        assert divergence.rounding < {"float32": 1e-3, "released": 2 * spread["largest"]}[mode], divergence
    assert len(different) <= {"float32": 1, "released": len(found)}[mode], different
    for name in greedy_reference.QUANTILES:
        assert distance[name] <= {"float32": 4, "released": 1.25}[mode] * spread[name], name


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_tokens_do_not_depend_on_how_many_requests_run(root: Path, requests: int) -> None:
    """As above with fewer slots, so that a prompt meets another slot, other neighbours and another graph."""
    options = greedy_reference.build_options("float32") | {"max_batch_size": requests}
    made = make_engines(root, 1, **options)
    params = SamplingParams(max_tokens=greedy_reference.TOKENS, ignore_eos=True)
    found, stats, _ = decode(made, greedy_reference.prompts(), params)
    assert stats.device_steps > len(found) * greedy_reference.TOKENS / requests / 6, "a step emits at most 6 a request"
    same = sum(a == b for a, b in zip(found, greedy_reference.recorded("float32"), strict=True))
    assert same >= len(found) - 1


def test_ten_thousand_steps_leave_nothing_behind(engines: Callable[..., Path]) -> None:
    made = engines(**NUMERICS["bfloat16"], max_batch_size=2, max_seq_len=1000)
    prompts, params = greedy_reference.prompts()[:2], SamplingParams(max_tokens=900, ignore_eos=True)
    process = psutil.Process()
    with Decoder.from_dir(made, device="cuda") as decoder:
        steps, before = 0, None
        while steps < 10_000:
            _, stats = decoder.generate(prompts, params)
            steps += stats.device_steps
            gc.collect()
            used = torch.cuda.memory_allocated(), process.memory_info().rss, -torch.cuda.mem_get_info()[0]
            before = before or used
        print(f"{steps} steps: {[after - first for after, first in zip(used, before, strict=True)]} bytes more")
        assert used[0] == before[0]
        assert used[1] - before[1] < 20e6, "the host's memory grows"
        # Two pages of the driver; this is of the whole device, which must have no other user that starts meanwhile.
        assert used[2] - before[2] <= 4 << 20, "the device's memory grows"


def test_the_host_waits_for_the_emitted_tokens_only(engines: Callable[..., Path], tmp_path: Path) -> None:
    """One event a step and nothing else that can wait: counted between a short run and a long one, so that prefill and
    the end of a run hide nothing."""
    made = engines(**NUMERICS["bfloat16"], max_batch_size=1, max_seq_len=1000)
    prompts = greedy_reference.prompts()[:1]
    counted: list[tuple[int, Counter[str]]] = []
    with Decoder.from_dir(made, device="cuda") as decoder:
        decoder.generate(prompts, SamplingParams(max_tokens=300, ignore_eos=True))
        for tokens in (300, 900):
            params, steps = SamplingParams(max_tokens=tokens, ignore_eos=True), 0

            def work(params: SamplingParams = params) -> None:
                nonlocal steps
                steps = decoder.generate(prompts, params)[1].device_steps

            events = profile(work, tmp_path)
            counted.append((steps, waiting_calls(events)))
            print(steps, "steps", dict(counted[-1][1]))
            found = replays(events)
            assert len(found) >= 2 * steps
            assert min(r.nodes for r in found) > 0
            gaps = sorted(idle_between(a, b) for a, b in pairwise(found))
            print(f"idle between replays: median {median(gaps):.1f} us, 90 % {gaps[len(gaps) * 9 // 10]:.1f} us")
    (short, few), (long, many) = counted
    assert long - short > 50
    more = many - few
    assert abs(more.pop("cudaEventSynchronize", 0) - (long - short)) <= 2
    # A step that waits every tenth time would show up here.
    assert sum(more.values()) <= 4, dict(more)


# -------------------------------------------------------------------------------------- capturing


@pytest.fixture
def pool() -> GraphPool:
    return GraphPool(torch.cuda.Stream())


def test_a_call_that_fails_leaves_no_graph_behind(pool: GraphPool) -> None:
    """GR-2: the error that comes out is the call's own, and the next eager call works."""
    x = torch.zeros(4, device="cuda")

    def call() -> None:
        x.add_(1)
        raise ValueError("one input is unset")

    with pytest.raises(GraphError, match="the draft can't be captured in a CUDA graph: one input is unset"):
        pool.capture(call, "the draft")
    x.add_(1)
    assert x.tolist() == [1.0] * 4
    replay = pool.capture(lambda: x.add_(1), "an addition")
    replay()
    assert x.tolist() == [2.0] * 4


def test_a_call_that_fails_beside_the_side_stream_reports_itself(pool: GraphPool) -> None:
    """GR-2: coefficients are under way on the side stream when the capture fails. The error is the call's own, not
    "unjoined work", and the same call is captured afterwards."""
    side = SideStream(torch.device("cuda", torch.cuda.current_device()))
    coefficients = example("MhcCoefficients v4.1", torch.bfloat16)
    inputs = [t.cuda() for t in coefficients.tensors]
    results: list[torch.Tensor] = []

    def call(problem: Exception | None = None) -> None:
        with side.joined(), executor_scope(side.execute):
            results[:] = coefficients.op(*inputs, **coefficients.attributes)
            if problem:
                raise problem

    call(), call()
    torch.cuda.synchronize()
    wanted = [t.clone() for t in results]
    with pytest.raises(GraphError, match="the target can't be captured in a CUDA graph: one input is unset"):
        pool.capture(lambda: call(ValueError("one input is unset")), "the target")
    replay = pool.capture(call, "the target")
    for t in results:
        t.fill_(float("nan"))
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_a_call_that_synchronises_is_refused(pool: GraphPool) -> None:
    """GR-4."""
    x = torch.zeros(4, device="cuda")
    with pytest.raises(GraphError, match="the step can't be captured"):
        pool.capture(lambda: x.sum().item(), "the step")
    assert x.add(1).tolist() == [1.0] * 4


def test_a_call_that_enqueues_nothing_is_refused(pool: GraphPool) -> None:
    with pytest.raises(GraphError, match="the capture of the step is empty"):
        pool.capture(lambda: None, "the step")
