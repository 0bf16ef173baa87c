"""The sampling loop split by vocabulary and by requests between two GPUs, one process each."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from dspark_trt.builder.model.markov_parallel import split_by_requests, vocabulary_shard
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.kernels import kernel_scope
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from dspark_trt.runtime_py.mailbox import Mailbox
from dspark_trt.runtime_py.requests import Statistics
from dspark_trt.runtime_py.stock import DistributedGroup
from torch import Tensor

from tests import greedy_reference
from tests.gpu.random_replays import values_that_differ
from tests.gpu.sampling_cases import MODES, Case, attributes, awkward, example
from tests.gpu.two_ranks import RANKS, Report, StoreCommunicator, check_survivor, lose_a_peer, run_ranks
from tests.mpi_jobs import run_job
from tests.placeholder_engines import make_engines

pytestmark = pytest.mark.gpu2

HIDDEN = 5120
VOCAB = 129280


def make_mailbox(communicator: StoreCommunicator, timeout_s: float = 10) -> Mailbox:
    device = torch.device("cuda", communicator.rank)
    return Mailbox.create(communicator, HIDDEN, torch.bfloat16, device, timeout_s=timeout_s)


def drawn(seed: int, requests: int, vocab: int, rank: int, mode: str) -> list[Tensor]:
    return example(seed, torch.bfloat16, requests, vocab, rank, sampling=mode != "greedy")


def _every_mode(communicator: StoreCommunicator, seed: int) -> Report:
    rank, number = communicator.rank, seed
    box = make_mailbox(communicator)
    for requests, vocab, markov_rank in [
        *((n, VOCAB, 256) for n in (1, 2, 8, 9, 64)),
        (3, VOCAB - 1, 256),  # the ranks' parts differ
        (2, 262144, 512),  # neither part stays on the chip
        (5, 3, 16),
        (4, 1000, 24),
    ]:
        for mode in MODES:
            number += 1
            inputs = awkward(drawn(number, requests, vocab, markov_rank, mode), RANKS)
            case = Case(box.tensor, rank, inputs, float64=mode == "float64", padded=number % 2 == 0)
            if number % 5 == rank:
                time.sleep(0.1)
            case.run()
    for activation in (torch.float16, torch.float32):
        case = Case(box.tensor, rank, example(seed, activation, 11, VOCAB, 64))
        case.run()
    _ten_thousand(communicator, box, seed)
    box.check()
    box.close()
    return number - seed


def _ten_thousand(communicator: StoreCommunicator, box: Mailbox, seed: int) -> None:
    """Two graphs of ten calls; the request counts jump from call to call."""
    counts = ([1, 64, 2, 9, 1, 8, 3, 40, 1, 5], [8, 1, 1, 64, 4, 2, 16, 1, 7, 64])

    def case(which: int, i: int) -> Case:
        mode, vocab = MODES[(i + which) % 3], (1000, 20000)[i % 2]
        inputs = awkward(drawn(seed + 10 * which + i, counts[which][i], vocab, 256, mode), RANKS)
        return Case(box.tensor, communicator.rank, inputs, float64=mode == "float64")

    sets = [[case(which, i) for i in range(10)] for which in range(2)]
    wrong = values_that_differ(box, sets, 1000, seed)
    assert wrong == 0, f"{wrong} values differ in 10,000 calls, seed {seed}"


@pytest.mark.timeout(180)
def test_split_by_vocabulary_equals_whole(seed: int) -> None:
    """SMP-5, SMP-6, SMP-9, GR-1: all noise modes and sizes, one by one and from graphs, one rank late at times."""
    reports = run_ranks(_every_mode, seed, 150)
    assert reports[0] == reports[1] == 9 * len(MODES)


def _by_requests(communicator: StoreCommunicator, seed: int) -> Report:
    """Eager and replayed, with the loop of the kernel and NCCL's collectives."""
    rank, device = communicator.rank, torch.device("cuda", communicator.rank)
    group = DistributedGroup(communicator, device)
    place = {"tp_size": RANKS, "rank": rank}
    for requests in (1, 2, 3, 8, 64):
        inputs = awkward(drawn(seed + requests, requests, VOCAB - 1, 256, "sampled"), RANKS)
        base, anchors, embed, head, *keys = inputs
        options = attributes(inputs, logits=False)
        logits = vocabulary_shard(base.flatten(0, 1).t(), **place).t().unflatten(0, base.shape[:2]).contiguous()

        def own_block(whole: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            own = (key[rows] for key in keys)  # noqa: B023
            tokens, features = MARKOV_SAMPLING(whole, anchors[rows], embed, head, *own, **options)  # noqa: B023
            return tokens, features[..., 0].float()

        def call() -> tuple[Tensor, Tensor]:
            with kernel_scope(), collective_scope(group.all_gather, group.all_to_all):
                return split_by_requests(logits, VOCAB - 1, own_block, **place)  # noqa: B023

        with kernel_scope():
            tokens, features = MARKOV_SAMPLING(*inputs, **options)
        wanted = tokens, features[..., 0].float()
        found = [call()]
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = call()
        graph.replay()
        torch.cuda.synchronize()
        for one in (*found, captured):
            assert torch.equal(one[0], wanted[0]) and torch.equal(one[1], wanted[1]), f"{requests} requests"
        del graph  # NCCL waits for graphs that hold its work
    group.close()
    return True


@pytest.mark.timeout(120)
def test_split_by_requests_equals_whole(seed: int) -> None:
    """SMP-9: tokens and what is sent beside them, to the bit, for counts that do and do not split."""
    assert run_ranks(_by_requests, seed, 100) == {0: True, 1: True}


def _lose_a_peer(communicator: StoreCommunicator, seed: int) -> Report:
    rank = communicator.rank
    box = make_mailbox(communicator, timeout_s=1.5)
    cases = [Case(box.tensor, rank, drawn(seed + i, 4, VOCAB, 256, "greedy")) for i in range(3)]
    for case in cases:
        case.run()
    return lose_a_peer(communicator, box, [case.launch for case in cases])


@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_other_in_bounded_time(seed: int) -> None:
    """TP-11: three calls wait once, not three times."""
    check_survivor(_lose_a_peer, seed)


@pytest.mark.timeout(300)
def test_split_drafts_in_the_decode_loop(tmp_path: Path) -> None:
    """SMP-9: inside the captured steps, by requests for eight of them and by vocabulary for the last few. Drafts don't
    decide which tokens there are, but how many a step gives."""
    options = greedy_reference.build_options("float32")
    engines = make_engines(tmp_path, 2, **options, vocabulary_split_from=1, request_split_from=5)
    job = run_job(2, "-m", "tests.gpu.decode_job", engines, "60", "2", "torch", timeout=200)
    assert job.status == 0, job.err
    report = json.loads(job.out.splitlines()[-1])
    (found,), (counted,) = report["tokens"], report["stats"]
    stats = Statistics(**counted)
    assert stats.device_steps > 0 and stats.tokens_per_step > 3
    wanted = [row[:60] for row in greedy_reference.recorded("float32")]
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    print(f"{same} of {len(wanted)} prompts are identical, {stats.tokens_per_step:.2f} tokens per step")
    assert same >= len(wanted) - 1
