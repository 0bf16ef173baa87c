"""Times DraftAttention, TargetAttention and ContextKvInsert beside torch, in one run.

    python tests/benchmarks/attention.py --output FILE.json [--quick]

``--quick`` leaves out torch.compile. V4.1-Flash's sizes: 64 heads of 512 channels, a window of 128, blocks of 5 draft
rows and 6 target rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dspark_trt.plugins.attention import cache_entry
from dspark_trt.plugins.context_kv_insert import CONTEXT_KV_INSERT
from dspark_trt.plugins.draft_attention import DRAFT_ATTENTION
from dspark_trt.plugins.target_attention import TARGET_ATTENTION
from torch import Tensor

from tests.benchmarks.benchmark import Report, argument_parser, cold_sets, copies, peer_sets, time_sets
from tests.gpu.kernel_call import KernelCall

HEADS, DIM, WINDOW, BLOCK = 64, 512, 128, 5
REQUESTS = (1, 2, 4, 8)
CACHE: dict[str, Any] = {"rope_dims": 64, "rope_theta": 1e4, "quant_width": 512, "quant_group": 32, "head_dim": DIM}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def ids(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def draft_inputs(requests: int) -> list[Tensor]:
    positions, slots = ids(1000 + 37 * r for r in range(requests)), ids(range(requests))
    wide = randn(requests, BLOCK, HEADS, DIM), randn(requests, BLOCK, DIM)
    return [*wide, positions, slots, randn(requests, WINDOW, DIM), torch.rand(HEADS, device="cuda")]


def rows_of(requests: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions and slots of ``length`` rows per request."""
    positions = [1000 + 37 * r + i for r in range(requests) for i in range(length)]
    return ids(positions), ids(r for r in range(requests) for _ in range(length))


def target_inputs(requests: int, length: int) -> list[Tensor]:
    ring = randn(requests, WINDOW + max(length, BLOCK + 1), DIM)
    return [randn(requests * length, HEADS, DIM), *rows_of(requests, length), ring, torch.rand(HEADS, device="cuda")]


def insert_inputs(requests: int, length: int) -> list[Tensor]:
    return [randn(requests * length, DIM), *rows_of(requests, length), randn(requests, WINDOW, DIM)]


def insert_call(inputs: list[Tensor]) -> KernelCall:
    call = KernelCall(CONTEXT_KV_INSERT, inputs, **CACHE)
    call.pointers["ring_out"] = call.pointers["ring"]
    return call


def torch_insert(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> Tensor:
    """Every slot is valid and no position is repeated, so one indexed copy does."""
    entries = cache_entry(kv, positions, CONTEXT_KV_INSERT.attributes_type(**CACHE))
    index = slots.long() * ring.shape[1] + (positions % ring.shape[1]).long()
    return ring.flatten(0, 1).index_copy_(0, index, entries)


def torch_draft(*tensors: Tensor) -> Tensor:
    return DRAFT_ATTENTION.reference(DRAFT_ATTENTION.attributes_type(**CACHE), *tensors)


def torch_target(*tensors: Tensor) -> Tensor:
    return TARGET_ATTENTION.reference(TARGET_ATTENTION.attributes_type(**CACHE, window=WINDOW), *tensors)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.manual_seed(0)
    report = Report()
    replays = 50 if arguments.quick else 200
    cases: list[tuple[str, list[Tensor], Callable[[list[Tensor]], KernelCall], Callable[..., Tensor], int]] = []
    for requests in REQUESTS:
        cases += [
            (
                "draft_attention",
                draft_inputs(requests),
                lambda one: KernelCall(DRAFT_ATTENTION, one, **CACHE),
                torch_draft,
                requests * BLOCK,
            ),
            (
                "target_attention",
                target_inputs(requests, BLOCK + 1),
                lambda one: KernelCall(TARGET_ATTENTION, one, **CACHE, window=WINDOW),
                torch_target,
                requests * (BLOCK + 1),
            ),
            (
                "context_kv_insert",
                insert_inputs(requests, BLOCK + 1),
                insert_call,
                torch_insert,
                requests * (BLOCK + 1),
            ),
        ]
    cases += [
        (
            "target_attention",
            target_inputs(1, 1024),
            lambda one: KernelCall(TARGET_ATTENTION, one, **CACHE, window=WINDOW),
            torch_target,
            1024,
        ),
        ("context_kv_insert", insert_inputs(8, WINDOW), insert_call, torch_insert, 8 * WINDOW),
    ]
    for name, inputs, make, expression, rows in cases:
        ours = make(inputs)
        # An output ring that is the input ring is not a second one; of the ring, insertion touches its rows only.
        inserts = name == "context_kv_insert"
        moved = 2 * inputs[0].nbytes if inserts else sum(t.nbytes for t in (*inputs, *ours.outputs))
        sets = copies(inputs, cold_sets(moved))
        for cache in ("cold", "warm"):
            timing = time_sets(lambda one, make=make: make(one).launch, sets, cache, replays)
            functions = {"torch eager": expression}
            if not arguments.quick and rows in (BLOCK, BLOCK + 1, 8 * BLOCK):
                functions["torch.compile"] = torch.compile(expression, dynamic=False)
            beside = {
                peer: time_sets(
                    lambda one, f=f: lambda: f(*one), sets[: peer_sets(peer, len(sets))], cache, replays // 5
                ).median_us
                for peer, f in functions.items()
            }
            facts: dict[str, Any] = {"rows": rows, "hidden": DIM, "cache": cache, "heads": HEADS}
            report.add(name, timing, moved_bytes=moved, peers=beside, **facts)
    report.write(arguments.output)


if __name__ == "__main__":
    main()
