"""ContextKvInsert on one GPU, alone and before the attentions that read what it wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_trt.plugins.context_kv_insert import CONTEXT_KV_INSERT
from dspark_trt.plugins.draft_attention import DRAFT_ATTENTION
from dspark_trt.plugins.target_attention import TARGET_ATTENTION
from torch import Tensor

from tests.gpu.attention_cases import (
    DEVICE,
    PLAIN,
    V41,
    Draw,
    activations,
    cached,
    distance,
    draft_inputs,
    formats,
    ids,
    insert,
)
from tests.gpu.kernel_call import KernelCall, bits, call, capture

pytestmark = pytest.mark.gpu


def insert_reference(inputs: list[Tensor], cache: dict[str, Any]) -> Tensor:
    """The ring after writing the rows one by one in order of position."""
    kv, positions, slots, ring = inputs
    out, window = ring.clone(), ring.shape[1]
    entries = cached(kv, positions, cache).to(ring.dtype)
    newest = {slot: int(positions[slots == slot].max()) for slot in set(slots.tolist())}
    for row in sorted(range(len(kv)), key=lambda row: int(positions[row])):
        slot, position = int(slots[row]), int(positions[row])
        if 0 <= slot < len(ring) and position > newest[slot] - window:
            out[slot, position % window] = entries[row]
    return out


def same_entries(got: Tensor, wanted: Tensor, untouched: Tensor) -> None:
    """Bit-equal, but for the rare value whose rotation rounds the other way (sin and cos differ by an ulp)."""
    assert torch.equal(bits(got)[untouched], bits(wanted)[untouched])
    assert float((got == wanted).double().mean()) > (0.999 if got.dtype != torch.float32 else 0.9)
    assert distance(got, wanted) < 1e-3


@activations
@formats
@pytest.mark.parametrize("rows", [1, 6, 40, 300])
def test_insert_against_float64(seed: int, activation: torch.dtype, cache: dict[str, Any], rows: int) -> None:
    """KV-3, KV-5: any order of rows, more rows of a slot than the ring holds, slots outside."""
    draw = Draw(seed, activation)
    chosen = [(0, 2, -1, 3, 2**31 - 1, -(2**31), 4, 2)[i % 8] for i in range(rows)]
    slots = ids(chosen)
    positions = (torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) + 2**20 - 200).int().to(DEVICE)
    ring = draw.values(4, 32, 512)
    inputs = [draw.values(rows, 512) * 3, positions, slots, ring]
    before, wanted = ring.clone(), insert_reference(inputs, cache)
    insert(inputs, cache).run()
    same_entries(ring, wanted, (bits(wanted) == bits(before)).all(-1))


def test_a_ring_of_accepted_rows(seed: int) -> None:
    """KV-3: 100 steps that insert accepted rows only; equal to a list that never forgets."""
    draw = Draw(seed, torch.bfloat16)
    ring = torch.full((1, 128, 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    history: list[Tensor] = []
    random = torch.Generator().manual_seed(seed)
    for _ in range(100):
        accepted = int(torch.randint(7, (1,), generator=random))
        kv, first = draw.values(6, 512), len(history)
        positions = torch.arange(first, first + 6, dtype=torch.int32, device=DEVICE)
        insert([kv, positions, ids([0] * accepted + [-1] * (6 - accepted)), ring], PLAIN).run()
        history += list(cached(kv, positions, PLAIN)[:accepted])
    for position in range(max(0, len(history) - 128), len(history)):
        assert distance(ring[0, position % 128], history[position]) < 1e-3, f"position {position}"


def test_rings_beyond_four_gigabytes(seed: int) -> None:
    """GR-7: offsets into the cache are 64-bit when it is written and when it is read."""
    if torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB of free GPU memory")
    draw, slot = Draw(seed, torch.bfloat16), 39999
    ring = torch.zeros(40000, 128, 512, dtype=torch.bfloat16, device=DEVICE)
    kv, positions = draw.values(128, 512), ids(range(128))
    insert([kv, positions, ids([slot] * 128), ring], PLAIN).run()
    assert int(ring.view(torch.int16).count_nonzero(dim=(1, 2)).count_nonzero()) == 1
    small = ring[slot:].clone()
    for op, shape, extra in ((DRAFT_ATTENTION, (1, 5, 8, 512), {}), (TARGET_ATTENTION, (1, 8, 512), {"window": 128})):
        q = draw.values(*shape)
        own = [draw.values(1, 5, 512)] if op is DRAFT_ATTENTION else []
        sink = draw.sinks(8)
        far = call(op, [q, *own, ids([128]), ids([slot]), ring, sink], **PLAIN, **extra)[0]
        near = call(op, [q, *own, ids([128]), ids([0]), small, sink], **PLAIN, **extra)[0]
        assert torch.equal(bits(far), bits(near)) and bool(far.any())


def test_another_output_ring_is_refused(seed: int) -> None:
    """ENG-5: the update is in place; a ring bound at two addresses is refused and stays as it is."""
    draw = Draw(seed, torch.bfloat16)
    ring = draw.values(2, 128, 512)
    before = ring.clone()
    one = KernelCall(CONTEXT_KV_INSERT, [draw.values(3, 512), ids([1, 2, 3]), ids([0, 0, 0]), ring], **V41)
    with pytest.raises(RuntimeError, match="pointer"):
        one.launch()
    assert torch.equal(bits(ring), bits(before))


def test_a_graph_replays_what_eager_calls_compute(seed: int) -> None:
    """GR-1, GR-4, KV-7: insertion and both attentions captured with one step, replayed with another's data."""

    def tensors(number: int) -> list[Tensor]:
        draw = Draw(seed + number, torch.bfloat16)
        positions = [130 + 7 * number, 11 + number, 5000]
        draft = draft_inputs(draw, positions, [2, 0, 1] if number else [0, 1, 2], heads=8, ring=(3, 134, 512))
        rows = [p - 1 - i for p in positions for i in range(4)]
        slots = [slot if i < 3 else -1 for slot in draft[3].tolist() for i in range(4)]
        return [*draft, draw.values(12, 512), ids(rows), ids(slots), draw.values(12, 8, 512)]

    def calls(t: list[Tensor]) -> list[KernelCall]:
        return [
            insert([t[6], t[7], t[8], t[4]], V41),
            KernelCall(DRAFT_ATTENTION, t[:6], **V41),
            KernelCall(TARGET_ATTENTION, [t[9], t[7], t[8], t[4], t[5]], **V41, window=128),
        ]

    def results(t: list[Tensor], step: list[KernelCall]) -> list[Tensor]:
        return [t[4], step[1].outputs[0], step[2].outputs[0]]

    wanted = []
    for number in range(2):
        inputs = tensors(number)
        step = calls(inputs)
        for one in step:
            one.run()
        wanted.append(results(inputs, step))
    buffers = tensors(0)
    captured = calls(buffers)
    graph, nodes = capture(*captured)
    assert nodes == 3
    for replay in range(6):
        for target, source in zip(buffers, tensors(replay % 2), strict=True):
            target.copy_(source)
        for one in captured[1:]:
            one.poison()
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(results(buffers, captured), wanted[replay % 2], strict=True):
            assert torch.equal(bits(got), bits(expected)), f"replay {replay}"
