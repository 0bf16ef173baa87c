"""DraftAttention and TargetAttention on one GPU against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_trt.plugins.draft_attention import DRAFT_ATTENTION
from dspark_trt.plugins.kernels import kernel_scope
from dspark_trt.plugins.op import Op
from dspark_trt.plugins.target_attention import TARGET_ATTENTION

from tests.gpu.attention_cases import (
    DEVICE,
    TINY,
    V4,
    V41,
    Draw,
    activations,
    attend,
    bound,
    cached,
    distance,
    draft_inputs,
    draft_reference,
    formats,
    ids,
    insert,
    target_inputs,
    target_reference,
    turn,
)
from tests.gpu.kernel_call import KernelCall, bits, call

pytestmark = pytest.mark.gpu


@activations
@formats
def test_draft_against_float64(seed: int, activation: torch.dtype, cache: dict[str, Any]) -> None:
    """KV-2, KV-8, POS-1: short and full contexts, far positions, unwritten rows NaN."""
    positions = [0, 1, 7, 64, 127, 128, 12000, 65536, 2**20 - 6, 2**31 - 8]
    inputs = draft_inputs(Draw(seed, activation), positions, list(range(10))[::-1], heads=16, ring=(10, 128, 512))
    attended = call(DRAFT_ATTENTION, inputs, **cache)[0]
    wanted = draft_reference(inputs, cache)
    for r in range(len(positions)):
        assert distance(attended[r], wanted[r]) < bound(activation, cache), f"position {positions[r]}"


@activations
@pytest.mark.parametrize(
    ("heads", "block", "window", "dim"),
    [
        (8, 5, 128, 64),  # the tiny model
        (3, 1, 1, 64),  # one key of each kind
        (1, 8, 59, 128),  # the block's rows end in the second key block
        (7, 5, 61, 192),  # and lie in two of them
        (16, 5, 300, 512),  # two chunks of keys; the block's rows lie in the second
        (3, 16, 187, 512),  # and in both
        (5, 3, 200, 256),  # clusters of four
        (6, 5, 130, 384),  # six slices of channels, which make no cluster
        (128, 2, 128, 512),  # V4-Pro's heads
    ],
)
def test_draft_shapes(seed: int, activation: torch.dtype, heads: int, block: int, window: int, dim: int) -> None:
    cache = TINY | {"head_dim": dim, "quant_width": dim}
    positions = [window // 2, window, 100 * window]
    inputs = draft_inputs(Draw(seed, activation), positions, [2, 0, 1], heads=heads, block=block, ring=(3, window, dim))
    attended = call(DRAFT_ATTENTION, inputs, **cache)[0]
    assert distance(attended, draft_reference(inputs, cache)) < bound(activation, cache)


@activations
@formats
def test_draft_like_the_reference(seed: int, activation: torch.dtype, cache: dict[str, Any]) -> None:
    """The reference rounds at the same places: what is left are float32 sums in another order, which now and
    then move a rounding of the result, of a probability or of an FP8 code of the block's own rows."""
    inputs = draft_inputs(Draw(seed, activation), [77, 5000], [1, 0], ring=(2, 128, 512))
    attended = call(DRAFT_ATTENTION, inputs, **cache)[0].cpu()
    attributes = DRAFT_ATTENTION.attributes_type(**cache)
    wanted = DRAFT_ATTENTION.reference(attributes, *(tensor.cpu() for tensor in inputs))
    assert distance(attended, wanted) < bound(activation, cache) / (1 if activation == torch.float32 else 4)
    if activation != torch.float32:
        assert float((attended == wanted).double().mean()) > 0.98


@activations
@pytest.mark.parametrize("requests", [1, 16])
def test_constant_values_give_one(activation: torch.dtype, requests: int) -> None:
    """KV-8: 133 valid keys of equal score and value 1 give exactly 1 where the sink weighs nothing."""
    dim, rotated = 512, 64
    ring = torch.ones(1, 128, dim, dtype=activation, device=DEVICE)
    ring[..., -rotated:] = 0
    kv = ring[:, :5].repeat(requests, 1, 1)
    q = torch.randn(requests, 5, 64, dim, device=DEVICE).to(activation)
    inputs = [q, kv, ids([128] * requests), ids([0] * requests), ring, torch.full((64,), -1e4, device=DEVICE)]
    attended = call(DRAFT_ATTENTION, inputs, **V41)[0]
    assert bool((attended[..., :-rotated] == 1).all()) and bool((attended[..., -rotated:] == 0).all())


@activations
@pytest.mark.parametrize("heads", [8, 64])
def test_unwritten_ring_rows_do_not_matter(seed: int, activation: torch.dtype, heads: int) -> None:
    """KV-2: bit-identical whatever the unwritten rows hold, also without any context."""
    positions = [0, 1, 127, 128]
    inputs = draft_inputs(Draw(seed, activation), positions, [0, 1, 2, 3], heads=heads, ring=(4, 128, 512))
    results = []
    for poison in (float("nan"), float("inf"), 0.0):
        for slot, position in enumerate(positions):
            inputs[4][slot, position:] = poison
        results.append(call(DRAFT_ATTENTION, inputs, **V41)[0].clone())
    assert all(torch.equal(bits(results[0]), bits(other)) for other in results[1:])
    assert bool(torch.isfinite(results[0]).all())


def test_the_block_is_not_causal(seed: int) -> None:
    """KV-8: the last row's key reaches the first row; another slot's entries reach nothing."""
    inputs = draft_inputs(Draw(seed, torch.bfloat16), [128], [0], ring=(2, 128, 512))
    before = call(DRAFT_ATTENTION, inputs, **V41)[0].clone()
    inputs[4][1] = 7.0
    assert torch.equal(bits(call(DRAFT_ATTENTION, inputs, **V41)[0]), bits(before))
    inputs[1][0, 4] = 7.0
    assert not torch.equal(call(DRAFT_ATTENTION, inputs, **V41)[0][0, 0], before[0, 0])


@activations
def test_slots_outside_give_zero_rows(seed: int, activation: torch.dtype) -> None:
    """KV-5, KV-6: padding requests."""
    outside = [-1, -(2**31), 2, 3, 2**31 - 1]
    draft = draft_inputs(Draw(seed, activation), [200] * 6, [*outside, 1], heads=8, ring=(2, 128, 512))
    attended = call(DRAFT_ATTENTION, draft, **V41)[0]
    assert bool((bits(attended[:5]) == 0).all()) and bool(attended[5].any())
    target = [draft[0][:, 0].contiguous(), *draft[2:]]
    attended = call(TARGET_ATTENTION, target, **V41, window=128)[0]
    assert bool((bits(attended[:5]) == 0).all()) and bool(attended[5].any())


def crowd() -> int:
    """A number of requests with 64 heads and blocks of 5 that is more than one block of 32 rows per multiprocessor."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count // 10 + 2


@activations
def test_a_request_alone_and_in_a_batch(seed: int, activation: torch.dtype) -> None:
    """HC-7, GR-1: the same bits alone, in larger batches and in another order; clusters serve one request, blocks of
    32 rows eight and blocks of 64 rows a crowd. Among them some are padding."""
    requests = crowd()
    positions = [[3, 128, 500, 64, 12000, 127, 65, 4][r % 8] for r in range(requests)]
    slots = torch.randperm(requests, generator=torch.Generator().manual_seed(seed)).tolist()
    slots[9] = -1
    inputs = draft_inputs(Draw(seed, activation), positions, slots, ring=(requests, 128, 512))
    everything = call(DRAFT_ATTENTION, inputs, **V41)[0]
    assert bool((bits(everything[9]) == 0).all())
    for picked in ([0], [requests - 1], [7, 2], [5, 4, 3, 2, 1], list(range(8)), list(range(requests))[::-1]):
        part = [tensor[picked].contiguous() for tensor in inputs[:4]]
        assert torch.equal(bits(call(DRAFT_ATTENTION, [*part, *inputs[4:]], **V41)[0]), bits(everything[picked]))


@activations
def test_target_rows_alone_and_in_a_batch(seed: int, activation: torch.dtype) -> None:
    """HC-7, GR-1: as above; a row with 64 heads is two blocks of 32."""
    requests = crowd()
    positions = [start + i for r in range(requests) for start in [[2, 126, 1000, 128][r % 4]] for i in range(6)]
    slots = [r for r in range(requests) for _ in range(6)]
    slots[50] = -1
    inputs = target_inputs(Draw(seed, activation), positions, slots, heads=64, ring=(requests, 134, 512))
    everything = call(TARGET_ATTENTION, inputs, **V41, window=128)[0]
    assert bool((bits(everything[50]) == 0).all())
    rows = list(range(6 * requests))
    for picked in (rows[:1], rows[6:12], rows[:24], rows[36:84], rows[::-1]):
        part = [tensor[picked].contiguous() for tensor in inputs[:3]]
        attended = call(TARGET_ATTENTION, [*part, *inputs[3:]], **V41, window=128)[0]
        assert torch.equal(bits(attended), bits(everything[picked]))


@activations
@pytest.mark.parametrize("cache", [V41, V4], ids=["v4.1", "v4"])
@pytest.mark.parametrize("requests", [4, 8, 64])
def test_batches_against_float64(seed: int, activation: torch.dtype, cache: dict[str, Any], requests: int) -> None:
    """KV-2, KV-8, POS-1 for many requests at once."""
    positions = [[0, 5, 127, 128, 1000, 2**20 - 6, 64, 63][r % 8] for r in range(requests)]
    inputs = draft_inputs(Draw(seed, activation), positions, list(range(requests))[::-1], ring=(requests, 128, 512))
    attended = call(DRAFT_ATTENTION, inputs, **cache)[0]
    wanted = draft_reference(inputs, cache)
    for r in range(requests):
        assert distance(attended[r], wanted[r]) < bound(activation, cache), f"request {r}"


@activations
@pytest.mark.parametrize(
    ("heads", "block", "window", "dim"),
    [
        (13, 5, 128, 512),  # 65 rows: the last block has one
        (7, 16, 128, 512),  # as many keys as a block may have at once
        (64, 5, 140, 512),  # and one more
        (16, 2, 33, 512),  # fewer keys than a block of them
        (8, 5, 123, 512),  # two blocks of keys exactly
        (8, 8, 128, 64),  # the tiny model's width: one slice
        (24, 5, 139, 192),  # three slices
    ],
)
def test_shapes_in_batches(seed: int, activation: torch.dtype, heads: int, block: int, window: int, dim: int) -> None:
    """Shapes at the edges of the kernel for many rows; a request alone has the same bits."""
    cache = TINY | {"head_dim": dim, "quant_width": dim}
    requests = 40
    positions = [[window // 2, window, 100 * window, 1][r % 4] for r in range(requests)]
    ring = (requests, window, dim)
    inputs = draft_inputs(Draw(seed, activation), positions, list(range(requests)), heads=heads, block=block, ring=ring)
    attended = call(DRAFT_ATTENTION, inputs, **cache)[0]
    wanted = draft_reference(inputs, cache)
    for r in range(requests):
        assert distance(attended[r], wanted[r]) < bound(activation, cache), f"request {r}"
    for r in (0, 3, requests - 1):
        part = [tensor[[r]] for tensor in inputs[:4]]
        assert torch.equal(bits(call(DRAFT_ATTENTION, [*part, *inputs[4:]], **cache)[0][0]), bits(attended[r]))


@activations
@pytest.mark.parametrize(
    ("heads", "ring_rows", "window", "cache"),
    [
        (64, 134, 128, V41),
        (16, 128, 128, V4),
        (8, 40, 33, TINY),  # a window that ends within a key block
        (5, 300, 300, TINY | {"head_dim": 512, "quant_width": 512}),
    ],
)
def test_target_against_float64(
    seed: int, activation: torch.dtype, heads: int, ring_rows: int, window: int, cache: dict[str, Any]
) -> None:
    """POS-1, KV-3: causal windows in position order across the ring's end, contexts shorter than the window."""
    positions = [0, 1, window - 1, window, ring_rows - 1, ring_rows, 1000, 2**20 - 1, *range(126, 132)]
    slots = [0] * 8 + [1] * 6
    inputs = target_inputs(
        Draw(seed, activation), positions, slots, heads=heads, ring=(2, ring_rows, cache["head_dim"])
    )
    attended = call(TARGET_ATTENTION, inputs, **cache, window=window)[0]
    wanted = target_reference(inputs, cache, window)
    for t in range(len(positions)):
        assert distance(attended[t], wanted[t]) < bound(activation, cache), f"position {positions[t]}"
    for picked in ([3], list(range(8, 14))):  # alone, and a request's rows without the others
        part = [tensor[picked].contiguous() for tensor in inputs[:3]]
        alone = call(TARGET_ATTENTION, [*part, *inputs[3:]], **cache, window=window)[0]
        assert torch.equal(bits(alone), bits(attended[picked]))


@pytest.mark.parametrize("heads", [8, 64])
def test_target_prefill(seed: int, heads: int) -> None:
    """1024 rows of one request, inserted and then attended to in pieces as long as the ring allows."""
    draw, window, ring_rows = Draw(seed, torch.bfloat16), 128, 640
    kv, q, sink = draw.values(1024, 512), draw.values(1024, heads, 512), draw.sinks(heads)
    ring = torch.full((2, ring_rows, 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    entries = cached(kv, torch.arange(1024, device=DEVICE), V41)
    for start in range(0, 1024, 512):
        positions, slots = ids(range(start, start + 512)), ids([1] * 512)
        insert([kv[start : start + 512].contiguous(), positions, slots, ring], V41).run()
        inputs = [q[start : start + 512].contiguous(), positions, slots, ring, sink]
        attended = call(TARGET_ATTENTION, inputs, **V41, window=window)[0]
        for t in (0, 1, 100, 127, 128, 300, 511):
            position = positions[t]
            keys = entries[max(0, start + t - window + 1) : start + t + 1]
            wanted = turn(attend(turn(q[start + t], position, V41), keys, sink), position, V41, back=True)
            assert distance(attended[t], wanted) < bound(torch.bfloat16, V41), f"row {start + t}"


@pytest.mark.parametrize(
    ("op", "cache", "ring", "activation"),
    [
        (DRAFT_ATTENTION, TINY | {"head_dim": 48, "quant_width": 32}, (1, 16, 48), torch.bfloat16),  # no multiple of 64
        (DRAFT_ATTENTION, TINY | {"head_dim": 1024}, (1, 16, 1024), torch.bfloat16),
        (DRAFT_ATTENTION, TINY | {"quant_group": 24, "quant_width": 48}, (1, 16, 64), torch.bfloat16),
        (DRAFT_ATTENTION, TINY | {"quant_width": 40}, (1, 16, 64), torch.float32),  # no multiple of the group
        (DRAFT_ATTENTION, V41 | {"quant_group": 128}, (1, 16, 512), torch.bfloat16),  # in two slices of channels
        (DRAFT_ATTENTION, V41 | {"rope_dims": 256}, (1, 16, 512), torch.float32),
        (TARGET_ATTENTION, TINY | {"window": 17}, (1, 17, 64), torch.float32),  # longer than the ring, see below
    ],
)
def test_unsupported_shapes_are_refused(
    op: Op, cache: dict[str, Any], ring: tuple[int, int, int], activation: torch.dtype
) -> None:
    draw = Draw(0, activation)
    if op is DRAFT_ATTENTION:
        inputs = draft_inputs(draw, [3], [0], heads=2, ring=ring)
    else:
        inputs = target_inputs(draw, [3], [0], heads=2, ring=ring)
    one = KernelCall(op, inputs, **cache)
    one.sizes["W"] = 16  # of 17: the declaration refuses a ring shorter than the window before the kernel does
    with pytest.raises(RuntimeError, match="shape or attribute"):
        one.launch()


@pytest.mark.parametrize("name", ["q", "kv", "positions", "slots", "ring", "sink", "attended"])
@pytest.mark.parametrize("offset", [None, 2])
def test_bad_pointers_are_refused(name: str, offset: int | None) -> None:
    one = KernelCall(DRAFT_ATTENTION, draft_inputs(Draw(0, torch.bfloat16), [3], [0], ring=(1, 128, 512)), **V41)
    one.pointers[name] = 0 if offset is None else one.pointers[name] + offset
    with pytest.raises(RuntimeError, match="null or not aligned"):
        one.launch()


def test_strided_queries_are_refused() -> None:
    inputs = draft_inputs(Draw(0, torch.bfloat16), [3], [0], ring=(1, 128, 512))
    inputs[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    with kernel_scope(), pytest.raises(ValueError, match="q must be contiguous"):
        DRAFT_ATTENTION(*inputs, **V41)
