"""Verification and schedules over the trained tiny models, on one rank and on two (threads)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import convert_checkpoint, read_shard_config
from dspark_trt.builder.network import load_network
from dspark_trt.runtime_py.acceptance import HeadAcceptance
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from dspark_trt.runtime_py.costs import CostTable
from dspark_trt.runtime_py.decoder import Decoder, Execution
from dspark_trt.runtime_py.requests import Completion, SamplingParams, Statistics
from dspark_trt.runtime_py.scheduling import EarlyStop, Scheduler, Threshold
from dspark_trt.runtime_py.session import TorchSession
from dspark_trt.runtime_py.verification import BlockVerification, StandardRejection, Verifier

from tests.thread_ranks import on_ranks

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "checkpoint"
PROMPTS = [[0, *b"It was the "], [0, *b"She had been so much"], [0, *b"A man"]]
TOKENS = 14


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def decode(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``decode(params, speculative=.., verifier=.., scheduler=..)``: completions and statistics, alike on all ranks."""
    shards, size = tmp_path_factory.mktemp("trained") / "shards", request.param
    convert_checkpoint(CHECKPOINT, shards, tp_size=size)
    config = read_shard_config(shards)
    build = BuildConfig(max_batch_size=len(PROMPTS), max_seq_len=200, sampling=True).checked(config.draft)
    networks = [{k: load_network(k, shards, rank, build) for k in ("target", "draft")} for rank in range(size)]

    def run(
        params: SamplingParams | list[SamplingParams], *, speculative: bool = True, **options: Any
    ) -> tuple[list[Completion], Statistics]:
        def work(communicator: Communicator) -> tuple[list[Completion], Statistics]:
            sessions = {k: TorchSession(n, communicator) for k, n in networks[communicator.rank].items()}
            loop = Decoder(
                sessions["target"],
                sessions["draft"] if speculative else None,
                target_config=config.target,
                draft_config=config.draft,
                build=build,
                communicator=communicator,
                check_lockstep=True,
                **options,
            )
            return loop.generate(PROMPTS, params)

        results = on_ranks(size, work)
        assert all(completions == results[0][0] for completions, _ in results)
        return results[0]

    return run


SCHEDULES: dict[str, Callable[[], Scheduler]] = {
    "threshold": lambda: Threshold(HeadAcceptance(), 0.6),
    "early stop": lambda: EarlyStop(HeadAcceptance(), CostTable({9: 0.0}, {n: 20.0 + n for n in range(1, 19)})),
}


@pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()])
def test_steps_on_the_device_give_the_same_text(decode: Callable[..., Any], method: Any) -> None:
    """Greedy and sampled requests in one batch, on every rank."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=i % 3 / 2, seed=i) for i in range(len(PROMPTS))]
    wanted, host = decode(params, verifier=Verifier(method))
    found, device = decode(params, verifier=Verifier(method), execution=Execution(steps="device"))
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert (device.steps, device.accepted_per_position) == (host.steps, host.accepted_per_position)
    assert device.device_steps > 0 == host.device_steps


def test_greedy_text_is_the_targets(decode: Callable[..., Any]) -> None:
    """Every method and schedule that is exact at temperature 0; drafts are really accepted, and fewer rows are
    verified for nearly as many tokens where the confidence head is asked."""
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain, _ = decode(greedy, speculative=False)
    penalized = SamplingParams(max_tokens=TOKENS, ignore_eos=True, frequency_penalty=1e-6)
    full = None
    for options in (
        {"verifier": Verifier(StandardRejection())},
        {"verifier": Verifier(BlockVerification()), "scheduler": SCHEDULES["threshold"]()},
        {"verifier": Verifier(BlockVerification()), "scheduler": SCHEDULES["early stop"]()},
    ):
        done, stats = decode(greedy, **options)
        assert done == plain and stats.tokens_per_step > 1.5
        full = full or stats
        kept, verified = sum(stats.accepted_per_position), sum(stats.proposed_per_position)
        if stats is not full:
            assert kept / verified > sum(full.accepted_per_position) / sum(full.proposed_per_position)
    # Through probabilities instead of the argmax; a penalty this small changes no choice.
    done, stats = decode(penalized, verifier=Verifier(BlockVerification()))
    assert done == plain and stats.tokens_per_step > 1.5


def test_sampled_text_repeats(decode: Callable[..., Any]) -> None:
    """The same seed gives the same text in another batch; drafts are accepted at temperature 1 as well."""
    warm = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=4)
    cold = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    done, stats = decode(warm)
    again, _ = decode([cold, warm, warm])
    assert again[1:] == done[1:] and again[0] != done[0]
    assert sum(stats.accepted_per_position) > 0.2 * sum(stats.proposed_per_position)


def test_requests_that_share_slots_are_drafted_for_as_well_as_alone(tmp_path: Path) -> None:
    """KV-1: six prompts through two slots, so that four take one that others left, and through six: the same text and
    as many drafts accepted at each position, which a window with rows of another request would cost."""
    convert_checkpoint(CHECKPOINT, tmp_path / "shards", tp_size=1)
    config = read_shard_config(tmp_path / "shards")
    prompts = [*PROMPTS, [0, *b"The next morning"], [0, *b"He"], [0, *b"In the middle of the night they were"]]
    found = []
    for slots in (2, 6):
        build = BuildConfig(max_batch_size=slots, max_seq_len=200).checked(config.draft)
        target, draft = (load_network(kind, tmp_path / "shards", 0, build) for kind in ("target", "draft"))
        loop = Decoder(
            TorchSession(target, SingleProcess()),
            TorchSession(draft, SingleProcess()),
            target_config=config.target,
            draft_config=config.draft,
            build=build,
            communicator=SingleProcess(),
        )
        done, stats = loop.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        assert stats.accepted_per_position[0] > 0
        found.append(([c.token_ids for c in done], stats.accepted_per_position, stats.steps))
    assert found[0] == found[1]
