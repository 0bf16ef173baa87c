"""Sampling through the real decode loop, over table models (rows SMP-1, SMP-2, SMP-3, SMP-9)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.builder.model.markov import MarkovOptions, draft_block
from dspark_trt.plugins import markov_sampling
from dspark_trt.plugins.markov_sampling import DRAFT_SALT
from dspark_trt.runtime_py import host_step, keyed_noise, verification
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.keyed_noise import ACCEPT_SALT, RECOVERY_SALT, gumbel_sample
from dspark_trt.runtime_py.requests import SamplingParams
from dspark_trt.runtime_py.verification import BlockVerification, Method, StandardRejection, Verifier
from torch import Tensor

from tests.fakes import TableDraft, Tables, table_decoder

THREE = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
CHI_SQUARE = {2: 27.63, 8: 42.70}
"""Degrees of freedom -> value that chance exceeds once in a million."""
methods = pytest.mark.parametrize("method", [StandardRejection(), BlockVerification()], ids=lambda m: type(m).__name__)


def chi_square(symbols: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(symbols.flatten(), minlength=probabilities.numel())
    expected = probabilities.flatten() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draw_three_symbols(method: Method, draft: Callable[[Tables], TableDraft] | None = None) -> Tensor:
    """131,072 independent draws as [requests, tokens] at a temperature that makes the target's distribution THREE; the
    draft's is random and differs everywhere."""
    tables, temperature = Tables.random(3, 4, seed=1), 0.6
    tables = dataclasses.replace(tables, target=(temperature * THREE.log()).float().expand(5, 3, 3).contiguous())
    requests, tokens = 4096, 32
    params = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=i) for i in range(requests)]
    options = {"draft": draft(tables)} if draft else {}
    loop = table_decoder(tables, slots=requests, verifier=Verifier(method), **options)
    done, stats = loop.generate([[i % 3] for i in range(requests)], params)
    assert all(0 < a < p for a, p in zip(stats.accepted_per_position, stats.proposed_per_position, strict=True))
    return torch.tensor([c.token_ids for c in done])


def statistics_of(drawn: Tensor) -> tuple[float, float]:
    pairs = 3 * drawn[:, 0::2] + drawn[:, 1::2]
    return chi_square(drawn, THREE), chi_square(pairs, THREE.unsqueeze(1) * THREE)


@methods
def test_draws_through_the_loop_have_the_distribution(method: Method) -> None:
    """SMP-1: 131,072 draws of 10 / 60 / 30 %, and the pairs of successive ones."""
    single, pairs = statistics_of(draw_three_symbols(method))
    assert single < CHI_SQUARE[2] and pairs < CHI_SQUARE[8]
    shared = torch.tensor([0.1016, 0.6304, 0.2680], dtype=torch.float64)  # what SMP-1 had
    assert chi_square(torch.multinomial(shared, 131_072, True, generator=torch.Generator().manual_seed(0)), THREE) > 100


def test_keys_without_the_step_are_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP-1: a position that is drafted again with the noise that block verification has already looked at."""
    for module in (host_step, verification):
        monkeypatch.setattr(module, "step_seeds", lambda seeds, anchors: seeds)
    single, pairs = statistics_of(draw_three_symbols(BlockVerification()))
    assert single > CHI_SQUARE[2] and pairs > CHI_SQUARE[8]


@methods
def test_no_key_is_used_twice(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP-1: logged keys of drafting, acceptance and recovery are pairwise disjoint, and each is used once."""
    logged: dict[int, list[tuple[int, ...]]] = {DRAFT_SALT: [], ACCEPT_SALT: [], RECOVERY_SALT: []}
    original = markov_sampling.noise_key

    def logging(seeds: Tensor, positions: Tensor, salt: int) -> Tensor:
        if salt in logged:
            salted = (positions.long() + salt) & 0xFFFFFFFF
            logged[salt] += map(tuple, torch.cat((seeds.long(), salted.unsqueeze(1)), 1).tolist())
        return original(seeds, positions, salt)

    for module in (markov_sampling, keyed_noise):
        monkeypatch.setattr(module, "noise_key", logging)
    params = [SamplingParams(temperature=1.0, max_tokens=60, seed=i - 3) for i in range(8)]
    table_decoder(Tables.random(5, 4), verifier=Verifier(method)).generate([[i % 5] for i in range(8)], params)
    draft, accept, recovery = logged.values()
    assert len(set(draft) | set(accept) | set(recovery)) == len(draft) + len(accept) + len(recovery)
    assert len(draft) == len(accept) > 500
    assert len(recovery) > 100


def test_salts_are_further_apart_than_positions() -> None:
    """SMP-1: no two purposes share a key at any two positions of a request."""
    salts = sorted([DRAFT_SALT, ACCEPT_SALT, RECOVERY_SALT, 2**32])
    assert min(b - a for a, b in pairwise(salts)) > 2**21
    assert all(salt + 2**21 < 2**32 for salt in salts[:-1])


def test_steps_have_seeds_of_their_own() -> None:
    """Different for every anchor of a request, the same on every call; both halves of a seed matter."""
    anchors = torch.arange(200_000, dtype=torch.int32)
    for seed in (0, 1, 2**63 + 5, -1):
        seeds = keyed_noise.seed_words([seed])
        steps = keyed_noise.step_seeds(seeds.expand(len(anchors), 2), anchors)
        assert len(steps.unique(dim=0)) == len(anchors) and steps.dtype == torch.int32
    words = keyed_noise.seed_words([0, 1, 2**32, 2**64 - 1, -1])
    assert words.tolist() == [[0, 0], [1, 0], [0, 1], [-1, -1], [-1, -1]]
    assert len(keyed_noise.step_seeds(words[:4], torch.zeros(4, dtype=torch.int32)).unique(dim=0)) == 4


def test_uniform_numbers() -> None:
    """Inside (0, 1), fine-grained, and uniform: 131,072 in 9 bins, by position and by id."""
    seeds = torch.zeros(131_072, 2, dtype=torch.int32)
    by_position = keyed_noise.uniform(seeds, torch.arange(131_072, dtype=torch.int32), salt=ACCEPT_SALT)
    by_id = keyed_noise.uniform(seeds[:1], torch.zeros(1, dtype=torch.int32), 131_072, salt=RECOVERY_SALT)
    for drawn in (by_position, by_id):
        assert drawn.min() > 0 and drawn.max() < 1
        assert len(drawn.unique()) == drawn.numel()  # 24 bits would repeat hundreds of times
        assert chi_square((drawn * 9).long(), torch.full((9,), 1 / 9, dtype=torch.float64)) < CHI_SQUARE[8]


PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.7, seed=5),
    SamplingParams(max_tokens=25, temperature=1.3, top_p=0.8, seed=6, num_draft_tokens=2),
    SamplingParams(max_tokens=40, frequency_penalty=0.5),
    SamplingParams(max_tokens=33, temperature=1.0, top_k=3, seed=7, presence_penalty=-0.5),
    SamplingParams(max_tokens=40, temperature=1.0, seed=5, num_draft_tokens=0),
    SamplingParams(max_tokens=40, temperature=0.2, min_p=0.1, seed=2**64 - 1),
    SamplingParams(max_tokens=40, temperature=0.7, seed=5),
]
PROMPTS = [[i % 7] * (1 + 9 * i) for i in range(7)] + [[1] * 10]
"""The last request is the second one again."""


@methods
@pytest.mark.parametrize("sampling", [True, False], ids=["sampled drafts", "greedy drafts"])
def test_a_request_depends_on_nothing_but_itself(method: Method, sampling: bool) -> None:
    """SMP-2, SMP-3: alone, in any order, with more requests than slots, between foreign random numbers; greedy,
    cold and warm requests of one batch."""
    tables = Tables.random(7, 4, seed=2)

    def run(order: list[int], slots: int) -> dict[int, list[int]]:
        loop = table_decoder(tables, slots=slots, sampling=sampling, verifier=Verifier(method))
        done, _ = loop.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        return {i: c.token_ids for i, c in zip(order, done, strict=True)}

    wanted = {i: run([i], 1)[i] for i in range(8)}
    assert wanted[1] == wanted[7] and len({tuple(w) for w in wanted.values()}) == 7
    pick = random.Random(4)
    for count in range(1, 9):
        order = pick.sample(range(8), count)
        torch.manual_seed(count)
        torch.rand(count)
        assert run(order, slots=pick.randint(1, 8)) == {i: wanted[i] for i in order}


class RandomReader(TableDraft):
    """A draft whose executor uses the global generators."""

    def run(self, *tensors: object) -> None:
        torch.rand(3), np.random.rand(2), random.random()
        super().run(*tensors)  # type: ignore[arg-type]


def test_global_generators_change_nothing() -> None:
    """SMP-2: a rank that consumes other random numbers decides the same."""
    tables = Tables.random(7, 4, seed=2)
    plain, _ = table_decoder(tables).generate(PROMPTS, PARAMS)
    other, _ = table_decoder(tables, draft=RandomReader(tables, sampling=True)).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in plain] == [c.token_ids for c in other]


def test_requests_without_a_seed() -> None:
    """Each call draws new seeds, which rank 0 gives to the others."""
    tables = Tables.random(7, 4, seed=2)
    params = SamplingParams(max_tokens=40, temperature=1.0)

    class SecondRank(SingleProcess):
        rank = 1

        def broadcast(self, value: object) -> object:
            # Seeds are the only whole numbers beyond a vocabulary that ranks exchange.
            drawn = isinstance(value, list) and all(isinstance(v, int) and v > 1000 for v in value)
            return sent if drawn else value

    first, second = (table_decoder(tables).generate([[1], [1]], params)[0] for _ in range(2))
    texts = [c.token_ids for c in first + second]
    assert len({tuple(t) for t in texts}) == 4
    sent = [11, 12]
    given = [dataclasses.replace(params, seed=seed) for seed in sent]
    wanted, _ = table_decoder(tables).generate([[1], [1]], given)
    received, _ = table_decoder(tables, communicator=SecondRank()).generate([[1], [1]], params)
    assert wanted == received


@methods
@pytest.mark.parametrize("sampling", [True, False], ids=["sampling draft", "greedy draft"])
def test_greedy_text_is_the_targets(method: Method, sampling: bool) -> None:
    """Temperature 0 with and without penalties, alone and beside sampled requests, 1 to 8 in shuffled orders."""
    tables = Tables.random(11, 5, seed=8)
    prompts = [[i] for i in range(8)]
    every = [SamplingParams(max_tokens=50, frequency_penalty=0.3 * (i % 2)) for i in range(8)]
    plain, stats = table_decoder(tables, speculative=False).generate(prompts, every)
    assert stats.tokens_per_step == 1
    warm = SamplingParams(max_tokens=30, temperature=1.0, seed=0)
    pick = random.Random(0)
    for count in range(1, 9):
        order = pick.sample(range(8), count)
        for extra in ([], [warm]):
            loop = table_decoder(tables, sampling=sampling, verifier=Verifier(method), slots=count)
            params = [every[i] for i in order] + extra
            done, stats = loop.generate([prompts[i] for i in order] + [[3]] * len(extra), params)
            assert [c.token_ids for c in done[:count]] == [plain[i].token_ids for i in order]
            assert stats.tokens_per_step > 1


def test_cold_sampling_tends_to_greedy() -> None:
    """A temperature that leaves one token of each distribution gives greedy text, drafts and all."""
    tables = Tables.random(11, 5, seed=8)
    greedy, _ = table_decoder(tables).generate([[3]], SamplingParams(max_tokens=100))
    for temperature in (1e-3, 1e-9, 1e-300):
        params = SamplingParams(max_tokens=100, temperature=temperature, seed=1)
        cold, _ = table_decoder(tables).generate([[3]], params)
        assert cold[0].token_ids == greedy[0].token_ids


def test_draft_logits_of_a_request_stay_with_it() -> None:
    """Sampled requests write the rows of their slots, wherever they stand in the batch; greedy ones write none."""
    tables = Tables.random(7, 4, seed=2)
    loop = table_decoder(tables, slots=3)
    cache = loop._host.draft_logits
    assert cache is not None
    cache.fill_(torch.nan)
    seen: list[Tensor] = []

    class Watch(Verifier):
        def __call__(self, requests, logits, draft_logits):  # type: ignore[no-untyped-def]
            for i, request in enumerate(requests if draft_logits is not None else []):
                if not request.params.greedy:
                    tokens = torch.tensor([[request.tokens[-1], *request.drafts[:-1]]])
                    wanted = tables.draft_logits(tokens, request.anchor_position)[0]
                    seen.append(draft_logits[i])
                    assert torch.allclose(draft_logits[i], wanted, atol=1e-5)
            return super().__call__(requests, logits, draft_logits)

    loop._host.verifier = Watch()
    params = [SamplingParams(max_tokens=n, temperature=t, seed=1) for n, t in ((9, 0.8), (30, 0), (40, 1.2), (20, 1))]
    loop.generate([[i] for i in range(4)], params)
    assert len(seen) > 10
    assert cache[1].isnan().all() and cache[[0, 2]].isfinite().all()


class Watermarked(TableDraft):
    """A draft whose sampler favours, by the draw's key, one of two halves of the vocabulary; ``honest`` ones write
    the distribution that they draw from into the draft logits."""

    def __init__(self, tables: Tables, *, honest: bool):
        super().__init__(tables, sampling=True)
        self.honest = honest

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        key = markov_sampling.noise_key(seeds, positions, salt + 2**20)
        green = (torch.arange(logits.shape[1]) + key.unsqueeze(1)) % 2 == 0
        drawn_from = logits if self.honest else logits.clone()
        drawn_from += 2.0 * green
        return gumbel_sample(drawn_from, temperature, seeds, positions, salt=salt)

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.check(inputs)
        embed, table = (SimpleNamespace(weight=w) for w in (self.tables.embed, self.tables.head))
        head: Any = SimpleNamespace(embed=embed, head=table)
        head.step, head.bias = lambda feature, hidden, state: (feature, None), lambda mixed, w: mixed @ w.T
        base = self.tables.base[inputs["positions"].long() % len(self.tables.base)]
        keys = inputs["positions"], inputs["temperature"], inputs["seeds"]
        drafted = draft_block(head, MarkovOptions(), base, base, inputs["anchor_ids"], keys, sampler=self.sample)
        outputs["draft_tokens"].copy_(drafted[0])
        outputs["draft_logits"].copy_(drafted[2])
        outputs["confidence"].zero_()


@methods
def test_sampler_hook_of_drafting_keeps_the_distribution(method: Method) -> None:
    """A draft with a distribution of its own, written into the cache, changes acceptance and nothing else."""
    single, pairs = statistics_of(draw_three_symbols(method, lambda tables: Watermarked(tables, honest=True)))
    assert single < CHI_SQUARE[2] and pairs < CHI_SQUARE[8]


def test_sampler_hook_that_hides_its_distribution_is_biased() -> None:
    """The same draws find out a draft that does not write what it drew from."""
    drawn = draw_three_symbols(StandardRejection(), lambda tables: Watermarked(tables, honest=False))
    single, pairs = statistics_of(drawn)
    assert single > CHI_SQUARE[2] and pairs > CHI_SQUARE[8]


def test_sampler_hook_of_verification() -> None:
    """A watermark's sampler draws the recovered tokens with the same keys, and may decide by them."""
    tables = Tables.random(7, 4, seed=2)
    keys: list[tuple[int, int]] = []

    def sampler(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        assert salt == RECOVERY_SALT and logits.shape == (len(positions), 7) and seeds.shape == (len(positions), 2)
        keys.extend(zip(seeds[:, 0].tolist(), positions.tolist(), strict=True))
        return gumbel_sample(logits, temperature, seeds, positions, salt=salt)

    hooked, _ = table_decoder(tables, verifier=Verifier(sampler=sampler)).generate(PROMPTS, PARAMS)
    plain, _ = table_decoder(tables).generate(PROMPTS, PARAMS)
    assert hooked == plain
    # The second request and its double draw with the same keys.
    assert len(keys) > 50 and len(keys) > len(set(keys)) > len(keys) / 2

    def stubborn(logits: Tensor, *_: Tensor, salt: int) -> Tensor:
        return torch.full((len(logits),), 6, dtype=torch.int32)

    odd = table_decoder(tables, verifier=Verifier(sampler=stubborn), speculative=False)
    done, _ = odd.generate([[0]], SamplingParams(temperature=1.0, seed=0, max_tokens=5))
    assert done[0].token_ids == [6] * 5
