"""Each operation's reference against an independent float64 computation with the same rounding points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.plugins.registry import ALL_OPS
from torch import Tensor

from tests.op_examples import BLOCK, CACHES, Example, example
from tests.oracle import numpy_ops as ops
from tests.oracle.numpy_ops import Array

ROUNDINGS = {torch.float32: ops.FP32, torch.float16: ops.FP16, torch.bfloat16: ops.BF16}
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
activations = pytest.mark.parametrize("activation", ROUNDINGS, ids=lambda d: str(d).removeprefix("torch."))


def arrays(one: Example) -> list[Array]:
    return [t.double().numpy() if t.is_floating_point() else t.numpy() for t in one.tensors]


def assert_rounded(found: Tensor, wanted: Array, activation: torch.dtype, *, equal: float = 0.98) -> None:
    """16-bit results: at most one unit in the last place away (two near zero of a long sum: a share of the
    rms), and ``equal`` of them the same bits. Float32 results: 4e-6 of the rms, two dozen roundings."""
    values = found.double().numpy()
    assert values.shape == wanted.shape
    rms = np.sqrt((wanted**2).mean())
    if activation is torch.float32:
        assert np.abs(values - wanted).max() < 4e-6 * rms
        return
    ulp = np.ldexp(1.0, np.frexp(np.abs(wanted))[1] - BITS[activation])
    assert (np.abs(values - wanted) <= ulp + 1e-5 * rms).all()
    share = (values == ROUNDINGS[activation](wanted)).mean()
    assert share >= equal, f"{share:.4f} of the values have the oracle's bits"


# Hyper-connections --------------------------------------------------------------------------------------


@activations
@pytest.mark.parametrize("variant", ["v4", "v4.1"])
def test_coefficients(variant: str, activation: torch.dtype) -> None:
    one = example(f"MhcCoefficients {variant}", activation, rows=50)
    streams, fn, scale, base = arrays(one)
    a = one.attributes
    wanted = ops.coefficients(
        streams, fn, scale, base, rms_eps=a["rms_eps"], hc_eps=a["hc_eps"], iterations=a["sinkhorn_iters"]
    )
    for found, value in zip(one.run(), wanted, strict=True):
        assert found.dtype == torch.float32
        # Values of order one; a projection of 512 float32 products, then Sinkhorn's 39 divisions.
        assert np.abs(found.double().numpy() - value).max() < 4e-6


@activations
def test_collapse(activation: torch.dtype) -> None:
    one = example("HcCollapse", activation, rows=50)
    streams, pre = arrays(one)
    assert_rounded(one.run()[0], ops.collapse(streams, pre), activation)


@activations
@pytest.mark.parametrize("variant", ["v4", "v4.1"])
def test_boundary(variant: str, activation: torch.dtype) -> None:
    """The collapse reads the rounded streams and the norm the rounded hidden (spec 7.2)."""
    one = example(f"MhcAllReduce {variant}", activation, rows=50)
    partial, streams, post, comb, pre, weight = arrays(one)
    mixed, hidden, normed = one.run()
    assert_rounded(mixed, ops.mix(partial, streams, post, comb), activation)
    assert_rounded(hidden, ops.collapse(mixed.double().numpy(), pre), activation)
    norm = ops.rms_norm(hidden.double().numpy(), weight, one.attributes["norm_eps"])
    assert_rounded(normed, norm, activation, equal=0.97)


@activations
def test_residual_boundary(activation: torch.dtype) -> None:
    one = example("MhcAllReduceResidualOnly", activation, rows=50)
    partial, streams, post, comb = arrays(one)
    assert_rounded(one.run()[0], ops.mix(partial, streams, post, comb), activation)


def test_boundary_reads_rounded_values() -> None:
    """Collapsing the unrounded streams, or norming the unrounded hidden, gives other bits in many places."""
    one = example("MhcAllReduce v4", torch.bfloat16, rows=50)
    partial, streams, post, comb, pre, weight = arrays(one)
    _, hidden, normed = one.run()
    unrounded = ops.collapse(ops.mix(partial, streams, post, comb), pre)
    assert (hidden.double().numpy() == ops.BF16(unrounded)).mean() < 0.9
    skipped = ops.BF16(ops.rms_norm(unrounded, weight, 1e-6))
    assert (normed.double().numpy() == skipped).mean() < 0.9


# Attention ----------------------------------------------------------------------------------------------


def cache_entries(kv: Array, positions: Array, cache: dict[str, Any], rounding: ops.Rounding) -> Array:
    out = ops.rope(kv, positions, cache["rope_dims"], cache["rope_theta"], rounding)
    width = cache["quant_width"]
    if width:
        out[..., :width] = ops.act_quant_dequant(out[..., :width], cache["quant_group"], rounding)
    return out


def flips_allowed(found: Tensor, wanted: Array, activation: torch.dtype) -> None:
    """Entries that pass through FP8: a rotated channel on a rounding border may take the neighbouring code
    (three mantissa bits, 1/8 of its size at most), rarely; all others have the same bits."""
    values = found.double().numpy()
    same = np.abs(values - wanted) <= np.abs(wanted) * 2.0 ** (1 - BITS[activation]) + 1e-6
    assert same.mean() > 0.995
    # Or the whole group another power of two, when its largest value is on the border.
    assert (np.abs(values - wanted) <= np.abs(wanted) / 8 + 2.0**-6)[~same].all()


@activations
@pytest.mark.parametrize("variant", CACHES)
def test_insertion(variant: str, activation: torch.dtype) -> None:
    """Rows in position order, each to position mod W of its slot; about 133 rows per slot, 128 stay."""
    one = example(f"ContextKvInsert {variant}", activation, rows=400)
    kv, positions, slots, ring = arrays(one)
    entries = cache_entries(kv, positions, one.attributes, ROUNDINGS[activation])
    wanted = ring.copy()
    for row in np.argsort(positions, kind="stable"):
        wanted[slots[row], positions[row] % ring.shape[1]] = entries[row]
    (found,) = one.run()
    written = np.zeros(ring.shape[:2], bool)
    written[slots, positions % ring.shape[1]] = True
    assert torch.equal(found[torch.from_numpy(~written)], one.tensors[3][torch.from_numpy(~written)])
    flips_allowed(found, wanted, activation)


@activations
@pytest.mark.parametrize("variant", CACHES)
def test_draft_attention(variant: str, activation: torch.dtype) -> None:
    """Ring slots in order, the block's own rows last, blocks of 64 keys, output turned back."""
    one = example(f"DraftAttention {variant}", activation, rows=20)
    q, kv, positions, slots, ring, sink = arrays(one)
    cache, rounding = one.attributes, ROUNDINGS[activation]
    rope = (cache["rope_dims"], cache["rope_theta"], rounding)
    (found,) = one.run()
    wanted = np.zeros_like(q)
    for r, position in enumerate(positions):
        rows = position + np.arange(BLOCK)
        own = cache_entries(kv[r], rows, cache, rounding)
        window, context = ring.shape[1], min(position, ring.shape[1])
        keys = np.concatenate((ring[slots[r]][:context], own))
        # The block's rows lie after the whole ring, however much of it has been written.
        places = np.concatenate((np.arange(context), window + np.arange(BLOCK)))
        turned = ops.rope(q[r], rows, *rope)
        out = np.stack([ops.sink_attention(turned[i], keys, sink, rounding, places) for i in range(BLOCK)])
        wanted[r] = ops.rope(out, rows, *rope, inverse=True)
    assert_attended(found, wanted, activation)


@activations
@pytest.mark.parametrize("variant", CACHES)
def test_target_attention(variant: str, activation: torch.dtype) -> None:
    """The last ``window`` positions, in position order, own position included."""
    one = example(f"TargetAttention {variant}", activation, rows=40)
    q, positions, slots, ring, sink = arrays(one)
    cache, rounding, window = one.attributes, ROUNDINGS[activation], one.attributes["window"]
    rope = (cache["rope_dims"], cache["rope_theta"], rounding)
    (found,) = one.run()
    wanted = np.zeros_like(q)
    for row, position in enumerate(positions):
        seen = np.arange(max(0, position - window + 1), position + 1)
        keys = ring[slots[row]][seen % ring.shape[1]]
        # The window's last place is the row's own position; one that is not full leaves its first places out.
        places = seen - (position - window + 1)
        turned = ops.rope(q[row], np.array(position), *rope)
        out = ops.sink_attention(turned, keys, sink, rounding, places)
        wanted[row] = ops.rope(out, np.array(position), *rope, inverse=True)
    assert_attended(found, wanted, activation)


def assert_attended(found: Tensor, wanted: Array, activation: torch.dtype) -> None:
    """Rounded three times (q, probabilities, output, output turned back): a border case in one of them moves
    the result by an ulp or two of the largest value in the sum. Float32: 3e-6 of the largest value."""
    difference = np.abs(found.double().numpy() - wanted)
    peak = np.abs(wanted).max(-1, keepdims=True)
    if activation is torch.float32:
        assert (difference <= 3e-6 * peak).all()
        return
    assert (difference <= peak * 2.0 ** (2 - BITS[activation])).all()
    assert (difference == 0).mean() > 0.95


# Quantised products -------------------------------------------------------------------------------------


@activations
@pytest.mark.parametrize("block", [32, 128])
def test_quantized_linear(block: int, activation: torch.dtype) -> None:
    """CK-5: scales multiply, one per block; the last block of rows is partial for 128."""
    one = example(f"QuantizedLinear {block}", activation, rows=50)
    x, weight, scale = arrays(one)
    values = ops.decode_e4m3(weight)
    values = values * ops.spread_blocks(ops.decode_e8m0(scale), block, values.shape)
    wanted = ops.act_quant_dequant(x, block, ops.FP32) @ values.T
    assert_rounded(one.run()[0], wanted, activation, equal=0.99)


@activations
@pytest.mark.parametrize("group", [32, 128])
def test_routed_experts(group: int, activation: torch.dtype) -> None:
    """FP4 weights, a clamp that acts (limit 1), the routing weight before w2, float32 sum over the experts."""
    one = example(f"RoutedExperts {group}", activation, rows=30)
    x, indices, weights, *packed = arrays(one)
    rounding, limit = ROUNDINGS[activation], one.attributes["swiglu_limit"]
    w1, w2, w3 = (ops.decode_fp4(packed[i]) * np.repeat(ops.decode_e8m0(packed[i + 1]), 32, -1) for i in (0, 2, 4))
    wanted = np.zeros_like(x)
    for row in range(len(x)):
        rounded = ops.act_quant_dequant(x[row], group, ops.FP32)
        for expert, weight in zip(indices[row], weights[row], strict=True):
            gate, up = rounding(w1[expert] @ rounded), rounding(w3[expert] @ rounded)
            inner = rounding(ops.swiglu(gate, up, limit) * weight)
            wanted[row] += rounding(w2[expert] @ ops.act_quant_dequant(inner, group, ops.FP32))
    (found,) = one.run()
    assert found.dtype == torch.float32
    difference = np.abs(found.double().numpy() - wanted) / np.sqrt((wanted**2).mean())
    # An inner value on a rounding border may flip its FP8 code, which moves a row by a percent.
    assert np.median(difference.max(-1)) < 1e-5
    assert difference.max() < 6e-2


# Sampling -----------------------------------------------------------------------------------------------


def hashed(x: int) -> int:
    """A 32-bit finaliser in unbounded integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def noise(seed: tuple[int, ...], position: int, vocab: int, bits: int, salt: int = 0x2545F491) -> Array:
    key = hashed((position + salt) % 2**32)
    for half in seed:
        key = hashed(key ^ (half % 2**32))
    dropped = 32 - bits
    kept = np.array([hashed(key ^ hashed(token)) >> dropped for token in range(vocab)])
    return -np.log(-np.log((kept + 0.5) * 2.0**-bits))


@activations
@pytest.mark.parametrize("kind", ["greedy", "sampled", "sampled in float64"])
def test_markov_sampling(kind: str, activation: torch.dtype) -> None:
    """The chain, its bias and its features; sampled rows with noise from (seed, position, token) alone."""
    one = example(f"MarkovSampling {kind}", activation, rows=30)
    base, anchors, embed, head, *keys = arrays(one)

    def choose(logits: Array, slot: int) -> Array:
        if kind == "greedy":
            return logits.argmax(-1)
        positions, temperature, seeds = keys
        bits = 32 if "float64" in kind else 23
        pairs = zip(seeds, positions, strict=True)
        drawn = np.stack([noise(tuple(map(int, s)), int(p) + slot, 97, bits) for s, p in pairs])
        cold = np.maximum(temperature, 1e-5)[:, None]
        return np.where(temperature[:, None] > 0, logits / cold + drawn, logits).argmax(-1)

    wanted = ops.markov(base, anchors, embed, head, choose)
    tokens, features, corrected = one.run()
    assert tokens.dtype == torch.int32 and features.dtype == activation and corrected.dtype == torch.float32
    assert np.array_equal(tokens.numpy(), wanted[0])
    assert np.array_equal(features.double().numpy(), wanted[1])
    assert np.abs(corrected.double().numpy() - wanted[2]).max() < 4e-6


@pytest.mark.parametrize("float64", [True, False])
def test_float64_noise_decides_what_float32_does_not(float64: bool) -> None:
    """Token 1's logit is the difference of the noises rounded to float32, so a score of 1e-8 decides, mostly."""
    count = 200
    drawn = np.stack([noise((i, 3), 7 * i, 2, 32) for i in range(count)])
    base = torch.zeros(count, 1, 2)
    base[:, 0, 1] = torch.from_numpy((drawn[:, 0] - drawn[:, 1]).astype(np.float32))
    lead = base[:, 0, 1].double().numpy() + drawn[:, 1] - drawn[:, 0]
    table, numbers = torch.zeros(2, 1), torch.arange(count, dtype=torch.int32)
    seeds = torch.stack((numbers, torch.full_like(numbers, 3)), 1)
    keys = (7 * numbers, torch.ones(count), seeds)
    attributes = {"block_size": 1, "sampling": True, "float64_noise": float64, "write_logits": False}
    tokens, _ = ALL_OPS["MarkovSampling"](base, torch.zeros_like(numbers), table, table, *keys, **attributes)
    clear = np.abs(lead) > 1e-9  # the rounding of scores of size one to 33 bits
    right = (tokens[:, 0].numpy() == (lead > 0))[clear]
    assert clear.sum() > 150 and (right.all() if float64 else right.mean() < 0.9)
