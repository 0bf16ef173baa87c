"""The Markov chain and its noise (rows POS-2, POS-3, SMP-1, SMP-3 to SMP-6)."""

from __future__ import annotations

import math

import pytest
import torch
from dspark_trt.plugins import markov_sampling
from dspark_trt.plugins.markov_sampling import DRAFT_SALT, MARKOV_SAMPLING, gumbel_noise, noisy_scores
from dspark_trt.plugins.op import OpError
from torch import Tensor

from tests.configs import ids

TRIALS = 131_072
THREE = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
PLAIN = {"float64_noise": False, "write_logits": True}
CHI_SQUARE = {1: 15.1, 2: 18.4, 4: 23.5, 8: 31.8}
"""Degrees of freedom -> value that chance exceeds once in ten thousand; the draws are fixed, not lucky."""


def draw(
    base: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    float64: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens and corrected logits without any Markov bias."""
    requests, block, vocab = base.shape
    table = torch.zeros(vocab, 1)
    if seeds is None:
        seeds = torch.stack((torch.arange(requests), torch.full((requests,), 7)), 1).int()
    if positions is None:
        positions = torch.full((requests,), 100, dtype=torch.int32)
    if isinstance(temperature, float):
        temperature = torch.full((requests,), temperature)
    tokens, _, corrected = MARKOV_SAMPLING(
        base,
        torch.zeros(requests, dtype=torch.int32),
        table,
        table,
        positions,
        temperature,
        seeds,
        block_size=block,
        sampling=True,
        float64_noise=float64,
        write_logits=True,
    )
    return tokens, corrected


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.flatten() * counts.sum()
    return float(((counts.flatten() - expected) ** 2 / expected).sum())


def known_logits(requests: int, block: int = 1) -> Tensor:
    return THREE.log().float().expand(requests, block, 3).contiguous()


# Chain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [False, True])
def test_bias_of_a_slot_comes_from_its_input_token(sampling: bool) -> None:
    """POS-2, POS-3: a head that always prefers the successor counts up from the anchor; a chain shifted by one
    slot would repeat the anchor's successor or start from a noise token."""
    vocab, block = 11, 5
    embed, head = torch.eye(vocab), 100 * torch.eye(vocab).roll(1, 0)  # head[successor, token] = 100
    anchors = ids(0, 3, 9)
    keys = (ids(5, 6, 7), torch.tensor([0.0, 1.0, 0.5]), torch.ones(3, 2, dtype=torch.int32)) if sampling else ()
    base = torch.randn(3, block, vocab, generator=torch.Generator().manual_seed(0))
    tokens, features, corrected = MARKOV_SAMPLING(
        base, anchors, embed, head, *keys, block_size=block, sampling=sampling, **PLAIN
    )
    chain = (anchors.unsqueeze(1) + torch.arange(block + 1)) % vocab
    assert torch.equal(tokens, chain[:, 1:].int())
    assert torch.equal(features.argmax(-1), chain[:, :-1])
    # Slot i: its base logits and its input token's row, nothing of another slot.
    assert torch.equal(corrected, base + 100 * torch.eye(vocab)[chain[:, 1:]])


def test_each_slot_uses_its_own_base_logits() -> None:
    base = torch.zeros(1, 5, 9)
    for slot, winner in enumerate((4, 8, 0, 3, 3)):
        base[0, slot, winner] = 10
    zero = torch.zeros(9, 2)
    tokens, *_ = MARKOV_SAMPLING(base, ids(1), zero, zero, block_size=5, sampling=False, **PLAIN)
    assert tokens.tolist() == [[4, 8, 0, 3, 3]]


# Distribution -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("float64", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_tokens_follow_the_tempered_distribution(temperature: float, float64: bool) -> None:
    """SMP-1, SMP-3: 131,072 draws of three symbols with 10 / 60 / 30 %, by seed."""
    tokens, corrected = draw(known_logits(TRIALS), temperature=temperature, float64=float64)
    probabilities = torch.softmax(THREE.log() / temperature, 0)
    counts = torch.bincount(tokens.flatten(), minlength=3)
    assert chi_square(counts, probabilities) < CHI_SQUARE[2]
    assert chi_square(counts, torch.tensor([0.1016, 0.6304, 0.2680], dtype=torch.float64)) > CHI_SQUARE[2]
    # q comes from the numbers that were sampled, before the temperature.
    assert torch.equal(corrected, known_logits(TRIALS))
    q = torch.softmax(corrected[0, 0].double() / temperature, -1)
    assert abs(float(q.sum()) - 1) < 1e-6 and (q - probabilities).abs().max() < 1e-6


@pytest.mark.parametrize("varied", ["position", "seed low", "seed high", "negative seeds"])
def test_every_part_of_the_key_gives_fresh_noise(varied: str) -> None:
    """SMP-1: one part of the key runs, the others stay."""
    count = torch.arange(TRIALS, dtype=torch.int32)
    fixed = torch.full_like(count, 12345)
    positions, low, high = fixed, fixed, fixed
    if varied == "position":
        positions = count
    elif varied == "seed low":
        low = count
    elif varied == "seed high":
        high = count
    else:
        low = -count
    tokens, _ = draw(known_logits(TRIALS), seeds=torch.stack((low, high), 1), positions=positions)
    assert chi_square(torch.bincount(tokens.flatten(), minlength=3), THREE) < CHI_SQUARE[2]


@pytest.mark.parametrize("pair", ["slots", "requests of neighbouring seeds", "salts"])
def test_neighbouring_draws_are_independent(pair: str) -> None:
    """SMP-1: nine cells of two draws against the product of the distribution; shared noise fills the diagonal alone."""
    if pair == "slots":
        tokens, _ = draw(known_logits(TRIALS, 2))
        first, second = tokens.unbind(1)
    elif pair == "salts":
        seeds = torch.stack((torch.arange(TRIALS), torch.zeros(TRIALS)), 1).int()
        positions = torch.full((TRIALS,), 77, dtype=torch.int32)
        noisy = [THREE.log().float() + gumbel_noise(seeds, positions, 3, salt=salt) for salt in (0, DRAFT_SALT)]
        first, second = (scores.argmax(-1) for scores in noisy)
    else:
        tokens, _ = draw(known_logits(TRIALS))
        first, second = tokens[0::2, 0], tokens[1::2, 0]
    counts = torch.bincount(3 * first.long() + second.long(), minlength=9)
    assert chi_square(counts, THREE.unsqueeze(1) * THREE) < CHI_SQUARE[8]
    shared = torch.bincount(4 * first.long(), minlength=9)
    assert chi_square(shared, THREE.unsqueeze(1) * THREE) > CHI_SQUARE[8]


def test_noise_is_standard_gumbel() -> None:
    """Mean Euler's constant, variance pi^2 / 6, within four standard errors; finite at both ends."""
    seeds = torch.stack((torch.arange(1000), torch.arange(1000) * 3), 1).int()
    noise = gumbel_noise(seeds, torch.arange(1000).int(), 1000, salt=DRAFT_SALT).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772156649) < 4 * math.sqrt(math.pi**2 / 6 / noise.numel())
    # Excess kurtosis 2.4: the standard error of the variance is var * sqrt((2 + 2.4) / n).
    variance = math.pi**2 / 6
    assert abs(float(noise.var()) - variance) < 4 * variance * math.sqrt(4.4 / noise.numel())
    # A million uniforms in sixty-four bins.
    bins = torch.histc(torch.exp(-torch.exp(-noise)), 64, 0, 1)
    assert chi_square(bins, torch.full((64,), 1 / 64, dtype=torch.float64)) < 120  # 63 degrees, one in 10,000


def test_float64_noise_has_the_whole_hash() -> None:
    """The float32 noise to its precision, and apart where 23 bits of the hash are not: a million draws of 2^23
    values repeat about 60,000 times, of 2^32 about 120 times."""
    seeds = torch.stack((torch.arange(1000), torch.arange(1000) * 3), 1).int()
    positions = torch.arange(1000).int()
    narrow, wide = (gumbel_noise(seeds, positions, 1000, salt=DRAFT_SALT, float64=w) for w in (False, True))
    assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
    bits = markov_sampling.noise_bits(markov_sampling.noise_key(seeds, positions, DRAFT_SALT), torch.arange(1000))
    assert torch.equal(wide, -torch.log(-torch.log((bits.double() + 0.5) / 2**32)))
    # Half a step of 2^-23 in the uniform moves the noise by this where the uniform is in the middle.
    assert (narrow - wide).abs().median() < 2e-6
    assert narrow.numel() - narrow.unique().numel() > 40_000 and wide.numel() - wide.unique().numel() < 200
    scores = noisy_scores(wide.float(), torch.ones(1000), seeds, positions, salt=DRAFT_SALT, float64=True)
    exact = wide.float().double() + wide
    assert (scores.view(torch.int64) % 2**20).eq(0).all() and (scores / exact - 1).abs().max() <= 2.0**-33
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan]]).expand(1000, 3)
    kept = noisy_scores(special, torch.ones(1000), seeds, positions, salt=DRAFT_SALT, float64=True)
    assert torch.equal(kept[:, :2], special[:, :2].double()) and kept[:, 2].isnan().all()


def test_vocabularies_too_large_for_float64_noise() -> None:
    """Ids have 20 bits of a kernel's candidate."""
    tables = (torch.zeros(2**20 + 1, 1), torch.zeros(2**20 + 1, 1))
    keys = (ids(0), torch.ones(1), torch.ones(1, 2).int())
    attributes = {"block_size": 1, "sampling": True, "float64_noise": True, "write_logits": False}
    with pytest.raises(OpError, match="float64 noise takes up to 1048576 tokens, V is 1048577"):
        MARKOV_SAMPLING(torch.zeros(1, 1, 2**20 + 1), ids(0), *tables, *keys, **attributes)


def test_noise_is_a_pure_function_of_its_key() -> None:
    """SMP-2: the global generator, the batch and the vocabulary's size do not matter."""
    seeds = torch.randint(-(2**31), 2**31 - 1, (20, 2), generator=torch.Generator().manual_seed(1)).int()
    positions = torch.arange(20).int() * 1000
    noise = gumbel_noise(seeds, positions, 64, salt=DRAFT_SALT)
    torch.manual_seed(99)
    torch.rand(10)
    assert torch.equal(gumbel_noise(seeds, positions, 64, salt=DRAFT_SALT), noise)
    assert torch.equal(gumbel_noise(seeds, positions, 500, salt=DRAFT_SALT)[:, :64], noise)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 64, salt=DRAFT_SALT), noise[order])
    for other in ((seeds.flip(1), positions, DRAFT_SALT), (seeds, positions + 1, DRAFT_SALT), (seeds, positions, 0)):
        assert (gumbel_noise(*other[:2], 64, salt=other[2]) == noise).double().mean() < 0.01


def test_draft_and_verification_share_no_key() -> None:
    """SMP-1: with one seed, position plus salt is the key; for positions up to 2^20 the draft's keys and those
    without a salt are disjoint, whatever the hash does with them (it is a bijection)."""
    positions = torch.arange(0, 2**20 + 16, 4099, dtype=torch.int64)
    salted = (positions + DRAFT_SALT) & 0xFFFFFFFF
    assert salted.min() > positions.max()
    hashes = markov_sampling._mix(torch.arange(2**20))
    assert hashes.unique().numel() == 2**20 and int(hashes.min()) >= 0 and int(hashes.max()) < 2**32


# Temperatures, precision, special rows ------------------------------------------------------------------


def test_temperatures_of_one_batch_are_kept_apart() -> None:
    """SMP-3: 0 (greedy, one-hot), 0.7 and 1.3 side by side; a cold but positive temperature is nearly greedy."""
    count = 3 * 30_000
    temperature = torch.tensor([0.0, 0.7, 1.3]).repeat(count // 3)
    tokens, corrected = draw(known_logits(count), temperature=temperature)
    assert (tokens[temperature == 0] == 1).all()
    for value in (0.7, 1.3):
        counts = torch.bincount(tokens[temperature == torch.tensor(value)].flatten(), minlength=3)
        assert chi_square(counts, torch.softmax(THREE.log() / value, 0)) < CHI_SQUARE[2]
    assert torch.equal(corrected, known_logits(count))
    cold, _ = draw(known_logits(1000), temperature=1e-6)
    assert (cold == 1).all()


def test_greedy_rows_equal_the_greedy_operation() -> None:
    """Temperature 0 inside a sampling draft gives what the draft without sampling gives, bias included."""
    generator = torch.Generator().manual_seed(3)
    base, anchors = torch.randn(9, 5, 50, generator=generator), torch.randint(0, 50, (9,), generator=generator).int()
    embed, head = torch.randn(50, 8, generator=generator), torch.randn(50, 8, generator=generator)
    greedy = MARKOV_SAMPLING(base, anchors, embed, head, block_size=5, sampling=False, **PLAIN)
    keys = (torch.arange(9).int(), torch.zeros(9), torch.ones(9, 2).int())
    for float64 in (False, True):
        attributes = {"block_size": 5, "sampling": True, "float64_noise": float64, "write_logits": True}
        sampled = MARKOV_SAMPLING(base, anchors, embed, head, *keys, **attributes)
        for one, other in zip(greedy, sampled, strict=True):
            assert torch.equal(one, other)


def test_logits_closer_than_a_bf16_step_are_told_apart() -> None:
    """SMP-4: near ties in float32 decide, greedy and sampled, and come back unrounded."""
    base = torch.full((TRIALS, 1, 3), 20.0)
    base[..., 2] += 0.05  # a bf16 step at 20 is 0.125
    assert base[0].bfloat16().unique().numel() == 1
    greedy, corrected = draw(base[:4], temperature=0.0)
    assert (greedy == 2).all() and torch.equal(corrected, base[:4])
    tokens, _ = draw(base)
    counts = torch.bincount(tokens.flatten(), minlength=3)
    assert chi_square(counts, torch.softmax(base[0, 0].double(), 0)) < CHI_SQUARE[2]
    assert chi_square(counts, torch.full((3,), 1 / 3, dtype=torch.float64)) > CHI_SQUARE[2]


@pytest.mark.parametrize(("sampling", "float64"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("vocab", [1, 2, 2047, 2048, 2049])
def test_tokens_are_always_ids(vocab: int, sampling: bool, float64: bool) -> None:
    """SMP-5, SMP-6: NaN, infinities and constant rows give an id in [0, V), the lowest of equals when greedy;
    the next slot goes on from it."""
    rows = [torch.zeros(vocab) for _ in range(6)]
    rows[0][:], rows[1][0], rows[2][-1], rows[3][:], rows[4][:] = (
        torch.nan,
        torch.nan,
        torch.nan,
        -torch.inf,
        torch.inf,
    )
    base = torch.stack(rows).unsqueeze(1).repeat(1, 5, 1)
    table = torch.ones(vocab, 1)
    keys = (torch.arange(6).int(), torch.ones(6), torch.ones(6, 2).int()) if sampling else ()
    attributes = {"block_size": 5, "sampling": sampling, "float64_noise": float64, "write_logits": False}
    tokens, *_ = MARKOV_SAMPLING(base, torch.zeros(6).int(), table, table, *keys, **attributes)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    first = 1 if vocab > 1 else 0
    assert tokens[[0, 3, 4]].eq(0).all()
    if not sampling:
        assert tokens[1].eq(first).all() and tokens[[2, 5]].eq(0).all()
    elif vocab > 1:
        assert tokens[1].ne(0).all(), "the NaN was drawn"
