"""MarkovSampling's kernel against float64 arithmetic that follows the tokens it chose."""

from __future__ import annotations

import pytest
import torch
from dspark_trt.plugins.kernels import kernel_scope
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING, gumbel_noise
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits, call, capture
from tests.gpu.sampling_cases import DEVICE, attributes, example

pytestmark = pytest.mark.gpu

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
VOCAB = 129280
MASK = 0xFFFFFFFF
SALT = 0x2545F491

activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda t: str(t).removeprefix("torch."))
modes = pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])


def run(inputs: list[Tensor], **options: bool) -> list[Tensor]:
    return call(MARKOV_SAMPLING, inputs, **attributes(inputs, **options))


def hashed(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 in 64-bit integers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise in float64 as the operation defines it, [requests, vocab]."""
    key = hashed((positions.long() + SALT) & MASK)
    for half in seeds.long().unbind(1):
        key = hashed(key ^ (half & MASK))
    tokens = hashed(torch.arange(vocab, dtype=torch.int64, device=seeds.device))
    uniform = ((hashed(key.unsqueeze(1) ^ tokens) >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def first_best(scores: Tensor) -> Tensor:
    """Lowest id of the largest score, NaN as -inf, 0 for a row without a number."""
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    return (scores == scores.amax(-1, keepdim=True)).int().argmax(-1).to(torch.int32)


def check(inputs: list[Tensor], outputs: list[Tensor]) -> None:
    base, anchors, embed, head, *keys = inputs
    tokens, features, corrected = outputs
    vocab = base.shape[2]
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocab
    previous = anchors
    for i in range(base.shape[1]):
        feature = embed[previous.long()]
        assert torch.equal(bits(features[:, i]), bits(feature))
        wanted = base[:, i].double() + feature.double() @ head.double().T
        # Matrix instructions drop what is below 2^-22 of the largest term, a few times in a chain of sums; float32
        # chains are up to 128 terms of rounding error 2^-24. Then one addition in float32.
        bound = 2.0**-17 * (feature.double().abs() @ head.double().abs().T) + 2.0**-23 * wanted.abs()
        logits = corrected[:, i]
        assert bool(((logits.double() - wanted).abs() <= bound).all()), f"slot {i}"
        if keys:
            positions, temperature, seeds = keys
            scores = logits.double() / temperature.clamp_min(1e-5).double().unsqueeze(1)
            # The kernel divides and adds in float32 and takes two float32 logarithms.
            tolerance = 2.0**-21 * (scores.abs().amax(1) + 20)
            scores = torch.where(
                temperature.unsqueeze(1) > 0, scores + noise(seeds, positions + i, vocab), logits.double()
            )
            tolerance = torch.where(temperature > 0, tolerance, 0.0)
        else:
            scores, tolerance = logits.double(), torch.zeros(len(logits), device=DEVICE, dtype=torch.float64)
        best = first_best(scores)
        chosen = scores.gather(1, tokens[:, i : i + 1].long()).squeeze(1)
        lost = scores.amax(1) - chosen
        assert bool(((tokens[:, i] == best) | ((lost > 0) & (lost <= tolerance))).all()), f"slot {i}"
        previous = tokens[:, i]


SHAPES = [
    (1, 1, 256),  # one token to choose from
    (1, 2, 16),  # the smallest rank
    (2, 2047, 256),
    (2, 2048, 256),
    (2, 2049, 256),
    (3, 264, 32),  # the tiny model
    (5, 700, 24),  # rows that end within a 64-byte piece
    (9, 5000, 256),  # one request more than a matrix instruction takes
    (64, 3000, 64),
    (2, 40000, 512),  # V4-Pro's rank
    (1, VOCAB, 256),
    (8, VOCAB, 256),
]


@activations
@modes
@pytest.mark.parametrize(("requests", "vocab", "rank"), SHAPES)
def test_chain_against_float64(
    seed: int, activation: torch.dtype, sampling: bool, requests: int, vocab: int, rank: int
) -> None:
    """SMP-3, SMP-4, SMP-6, GR-6: features, corrected logits and choices of every slot."""
    inputs = example(seed, activation, requests, vocab, rank, sampling=sampling)
    check(inputs, run(inputs))


@pytest.mark.parametrize("block", [1, 2, 7, 8])
def test_block_sizes(seed: int, block: int) -> None:
    inputs = example(seed, torch.bfloat16, 3, 1000, 256, block=block)
    check(inputs, run(inputs))


@activations
@pytest.mark.parametrize("mode", ["greedy", "sampled", "float64"])
@pytest.mark.parametrize("requests", [1, 6, 9])
def test_same_tokens_as_the_reference(seed: int, activation: torch.dtype, requests: int, mode: str) -> None:
    inputs = example(seed, activation, requests, 3000, 128, sampling=mode != "greedy")
    inputs[0][0, 1] = -torch.inf
    inputs[0][-1, 2, 5:], inputs[0][-1, 3, 7] = torch.nan, torch.inf
    options = {"float64": mode == "float64"}
    tokens, features, corrected = run(inputs, **options)
    values = MARKOV_SAMPLING.attributes_type(**attributes(inputs, **options))
    wanted = MARKOV_SAMPLING.reference(values, *(tensor.cpu() for tensor in inputs))
    assert torch.equal(tokens.cpu(), wanted[0]) and torch.equal(features.cpu(), wanted[1])
    assert float((corrected.cpu() - wanted[2]).nan_to_num(0.0).abs().max()) < 3e-5


def without_bias(base: Tensor, activation: torch.dtype = torch.bfloat16, rank: int = 256) -> list[Tensor]:
    requests, _, vocab = base.shape
    table = torch.zeros(vocab, rank, dtype=activation, device=DEVICE)
    return [base.contiguous(), torch.zeros(requests, dtype=torch.int32, device=DEVICE), table, table.clone()]


@pytest.mark.parametrize("vocab", [1, 2, 2047, 2048, 2049, VOCAB])
def test_the_lowest_id_wins_a_tie(vocab: int) -> None:
    """SMP-6: ties inside a tile, across tiles, warps and blocks; a winner at V - 1; constant logits."""
    pairs = [(0, vocab - 1), (vocab - 1, vocab - 1), (7, 8), (15, 16), (127, 128), (979, 980), (vocab // 2, vocab - 1)]
    pairs = [(min(a, vocab - 1), min(b, vocab - 1)) for a, b in pairs]
    base = torch.full((len(pairs) + 1, 3, vocab), -1.0, device=DEVICE)
    for row, pair in enumerate(pairs):
        base[row][:, list(pair)] = 0.5
    tokens = run(without_bias(base))[0]
    wanted = torch.tensor([a for a, _ in pairs] + [0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(tokens, wanted.unsqueeze(1).expand(-1, 3))


@activations
def test_rows_with_nan_and_infinity(activation: torch.dtype) -> None:
    """SMP-5: NaN counts as -inf, a row without a number gives 0, -0 ties with 0; never V or -1."""
    nan, inf, vocab = float("nan"), float("inf"), 3001
    special: list[tuple[float, dict[int, float], int]] = [
        (nan, {}, 0),
        (-inf, {}, 0),
        (inf, {}, 0),
        (nan, {2000: -5.0}, 2000),
        (-inf, {vocab - 1: -3e38}, vocab - 1),
        (-1.0, {0: nan, 1234: 2.0}, 1234),
        (-1.0, {vocab - 1: nan}, 0),
        (-1.0, {77: nan, 78: inf, 2999: inf}, 78),
        (-1.0, {5: -0.0, 900: 0.0}, 5),
        (-1.0, {5: 0.0, 900: -0.0}, 5),
        (nan, {17: -inf}, 0),
    ]
    base = torch.stack([torch.full((2, vocab), fill) for fill, _, _ in special])
    for row, (_, values, _) in enumerate(special):
        for token, value in values.items():
            base[row, :, token] = value
    wanted = torch.tensor([token for *_, token in special], dtype=torch.int32, device=DEVICE)
    inputs = without_bias(base.to(DEVICE), activation, rank=32)
    tokens, _, corrected = run(inputs)
    assert torch.equal(tokens, wanted.unsqueeze(1).expand(-1, 2))
    assert torch.equal(bits(corrected)[~base.isnan()], bits(inputs[0] + 0.0)[~base.isnan()])
    assert torch.equal(corrected.isnan().cpu(), base.isnan())

    rows = len(special)
    keys = [
        torch.arange(rows, dtype=torch.int32, device=DEVICE),
        torch.ones(rows, device=DEVICE),
        torch.arange(2 * rows, dtype=torch.int32, device=DEVICE).view(rows, 2),
    ]
    tokens = run([*inputs, *keys])[0].cpu()
    for row in range(rows):
        logits = base[row, 0].nan_to_num(nan=-inf, posinf=inf, neginf=-inf)
        # +inf beats all noise, -inf and NaN never win against a number.
        allowed = logits == inf if logits.max() == inf else logits > -inf
        assert all(bool(allowed[token]) or (token == 0 and not allowed.any()) for token in tokens[row])


@activations
@modes
def test_a_request_alone_and_in_a_batch(seed: int, activation: torch.dtype, sampling: bool) -> None:
    """SMP-2, HC-7: every request's bits are the same alone, in any batch, and in any order."""
    inputs = example(seed, activation, 64, 2500, 256, sampling=sampling)
    tables = inputs[2:4]
    everything = run(inputs)
    assert len(torch.unique(everything[0])) > 64
    for requests in (1, 3, 8, 9, 40):
        picked = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:requests].to(DEVICE)
        part = [tensor[picked].contiguous() for tensor in (*inputs[:2], *inputs[4:])]
        outputs = run([*part[:2], *tables, *part[2:]])
        for alone, batched in zip(outputs, everything, strict=True):
            assert torch.equal(bits(alone), bits(batched[picked])), f"{requests} requests"


def test_full_size_alone_and_in_a_batch(seed: int) -> None:
    inputs = example(seed, torch.bfloat16, 8, VOCAB, 256)
    everything = run(inputs)
    for request in (0, 7):
        part = [inputs[0][request : request + 1].clone(), inputs[1][request : request + 1].clone(), *inputs[2:]]
        for alone, batched in zip(run(part), everything, strict=True):
            assert torch.equal(bits(alone), bits(batched[request : request + 1]))


@modes
@pytest.mark.parametrize("requests", [1, 9])
def test_a_graph_replays_what_eager_calls_compute(seed: int, requests: int, sampling: bool) -> None:
    """GR-1, GR-4, GR-6, KV-7: captured with one batch, replayed with another, many times."""
    first, second = (example(seed + i, torch.bfloat16, requests, 5000, 256, sampling=sampling) for i in range(2))
    wanted = [[tensor.clone() for tensor in run(inputs)] for inputs in (first, second)]
    captured = [tensor.clone() for tensor in first]
    one = KernelCall(MARKOV_SAMPLING, captured, **attributes(captured))
    graph, nodes = capture(one)
    assert nodes == 2
    for turn in range(20):
        for target, source in zip(captured, second if turn % 2 else first, strict=True):
            target.copy_(source)
        one.poison()
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(one.outputs, wanted[turn % 2], strict=True):
            assert torch.equal(bits(got), bits(expected)), f"replay {turn}"


@modes
def test_logits_are_there_when_asked_for(seed: int, sampling: bool) -> None:
    """Without them the pointer isn't looked at, with them it must be one."""
    inputs = example(seed, torch.bfloat16, 2, 3000, 256, sampling=sampling)
    tokens, features, corrected = run(inputs)
    quiet = KernelCall(MARKOV_SAMPLING, inputs, **attributes(inputs, logits=False))
    quiet.pointers["corrected_logits"] = corrected.data_ptr()
    corrected.view(torch.int32).fill_(-1)
    outputs = quiet.run()
    assert torch.equal(outputs[0], tokens) and torch.equal(bits(outputs[1]), bits(features)) and len(outputs) == 2
    assert bool((bits(corrected) == -1).all())


@pytest.mark.parametrize("requests", [1, 8, 40])
def test_float64_noise_decides_what_float32_does_not(requests: int) -> None:
    """Token 1's logit is the difference of the noises rounded to float32, so a score of 1e-8 decides, mostly."""
    block, wrong = 8, 0
    for turn in range(200 // requests):
        numbers = torch.arange(turn * requests, (turn + 1) * requests, dtype=torch.int32)
        seeds, positions = torch.stack((numbers, numbers % 3), 1), numbers * block
        drawn = torch.stack(
            [gumbel_noise(seeds, positions + i, 2, salt=SALT, float64=True) for i in range(block)], 1
        )  # [requests, block, 2]
        base = torch.zeros(requests, block, 2)
        base[..., 1] = (drawn[..., 0] - drawn[..., 1]).float()
        lead = base[..., 1].double() + drawn[..., 1] - drawn[..., 0]
        keys = [positions.to(DEVICE), torch.ones(requests, device=DEVICE), seeds.to(DEVICE)]
        inputs = [*without_bias(base.to(DEVICE)), *keys]
        clear = lead.abs() > 1e-9  # the rounding of scores of size one to 33 bits
        assert torch.equal(run(inputs, float64=True)[0].cpu()[clear], (lead > 0).int()[clear])
        wrong += int((run(inputs)[0].cpu() != (lead > 0).int())[clear].sum())
    assert wrong > 50


def test_float64_noise_wants_a_small_vocabulary() -> None:
    """Ids have 20 bits."""
    inputs = example(0, torch.bfloat16, 1, 100, 32, sampling=True)
    one = KernelCall(MARKOV_SAMPLING, inputs, **attributes(inputs, float64=True))
    one.sizes["V"] = 2**20 + 1
    with pytest.raises(RuntimeError, match="shape or attribute"):
        one.launch()


@pytest.mark.parametrize(
    ("temperature", "logits"),
    [(1.3, [0.3, 1.0, -0.4]), (1e-7, [0.0, 1e-5, -4e-6])],  # the second is below the floor of 1e-5
)
def test_drawn_tokens_follow_the_softmax(temperature: float, logits: list[float]) -> None:
    """SMP-1: three tokens, 131,072 draws under distinct keys; the limit is that of chi-square(2) at 1e-6."""
    requests, block, calls = 64, 8, 256
    row = torch.tensor(logits)
    base = row.repeat(requests, block, 1).to(DEVICE)
    counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for turn in range(calls):
        numbers = torch.arange(turn * requests, (turn + 1) * requests, dtype=torch.int32, device=DEVICE)
        seeds = torch.stack((torch.full_like(numbers, 5), numbers % 3), 1)
        keys = [numbers * block, torch.full((requests,), temperature, device=DEVICE), seeds]
        tokens = run([*without_bias(base, rank=16), *keys])[0]
        counts += torch.bincount(tokens.flatten(), minlength=3)
    expected = torch.softmax(row.double() / max(temperature, 1e-5), 0) * requests * block * calls
    assert float(((counts.cpu() - expected) ** 2 / expected).sum()) < 27.6


def test_tables_beyond_four_gigabytes(seed: int) -> None:
    """GR-7: offsets of rows are 64-bit."""
    vocab, rank = 2**23 + 17, 256
    if torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB of free GPU memory")
    table = torch.zeros(vocab, rank, dtype=torch.bfloat16, device=DEVICE)
    table[vocab - 3, 0] = 2.0
    table[vocab - 2, 0] = 3.0
    base = torch.zeros(1, 2, vocab, device=DEVICE)
    base[0, 0, vocab - 3] = 1.0
    inputs = [base, torch.zeros(1, dtype=torch.int32, device=DEVICE), table, table]
    tokens, features, corrected = run(inputs)
    assert tokens.tolist() == [[vocab - 3, vocab - 2]]
    assert features[0, :, 0].tolist() == [0.0, 2.0] and corrected[0, 1, vocab - 2].item() == 6.0


@pytest.mark.parametrize(
    ("requests", "vocab", "rank", "block", "activation"),
    [
        (1, 100, 8, 5, torch.bfloat16),
        (1, 100, 20, 5, torch.bfloat16),
        (65, 100, 32, 5, torch.bfloat16),
        (1, 100, 32, 9, torch.bfloat16),
        (1, 100, 4104, 5, torch.bfloat16),
        (1, 100, 4096, 5, torch.float32),  # one tile would not fit in shared memory
    ],
)
def test_unsupported_shapes_are_refused(
    requests: int, vocab: int, rank: int, block: int, activation: torch.dtype
) -> None:
    inputs = example(0, activation, requests, vocab, rank, block=block)
    one = KernelCall(MARKOV_SAMPLING, inputs, **attributes(inputs))
    with pytest.raises(RuntimeError, match="shape or attribute"):
        one.launch()
    assert bool((bits(one.outputs[0]) == -1).all())


POINTERS = ["base_logits", "anchor_ids", "embed", "head", "seeds", "draft_tokens", "features", "corrected_logits"]


@pytest.mark.parametrize("name", POINTERS)
@pytest.mark.parametrize("offset", [None, 2])
def test_bad_pointers_are_refused(name: str, offset: int | None) -> None:
    inputs = example(0, torch.bfloat16, 1, 100, 32, sampling=True)
    one = KernelCall(MARKOV_SAMPLING, inputs, **attributes(inputs))
    one.pointers[name] = 0 if offset is None else one.pointers[name] + offset
    with pytest.raises(RuntimeError, match="null or not aligned"):
        one.launch()


def test_strided_logits_are_refused() -> None:
    """SMP-10: step-major logits viewed as request-major ones."""
    inputs = example(0, torch.bfloat16, 2, 100, 32)
    inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    with kernel_scope(), pytest.raises(ValueError, match="base_logits must be contiguous"):
        MARKOV_SAMPLING(*inputs, **attributes(inputs))


def test_no_requests_is_a_no_op() -> None:
    inputs = example(0, torch.bfloat16, 1, 100, 32)
    one = KernelCall(MARKOV_SAMPLING, inputs, **attributes(inputs))
    one.sizes["requests"] = 0
    one.launch()
    assert bool((bits(one.outputs[0]) == -1).all())
