"""Times MarkovSampling beside what a user would run instead, in one run.

    python tests/benchmarks/sampling.py --output FILE.json [--quick]

``--quick`` leaves out torch.compile. ``bytes`` counts the head table once per step, since a chain that keeps nothing
on the chip must read it once per step; the kernel keeps part of it, so it may take less time than that floor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from torch import Tensor

from tests.benchmarks.benchmark import WARM_CALLS, Report, argument_parser, cold_sets, time_graph, time_sets
from tests.gpu.kernel_call import KernelCall

VOCAB, RANK, BLOCK = 129280, 256, 5
REQUESTS = (1, 2, 4, 8)
TILES = ((32, 4), (64, 4), (64, 8), (128, 8))
"""Rows and warps of the Triton kernel; the best one counts."""
Launch = Callable[[], Any]


def inputs_of(requests: int) -> list[Tensor]:
    """Base logits, anchors, embed, head, positions, temperature, seeds."""
    table = torch.randn(2, VOCAB, RANK, device="cuda").bfloat16()
    return [
        torch.randn(requests, BLOCK, VOCAB, device="cuda"),
        torch.randint(VOCAB, (requests,), dtype=torch.int32, device="cuda"),
        table[0] * 0.3,
        table[1].clone(),
        torch.arange(requests, dtype=torch.int32, device="cuda"),
        torch.full((requests,), 0.8, device="cuda"),
        torch.randint(2**31 - 1, (requests, 2), dtype=torch.int32, device="cuda"),
    ]


def kernel_call(inputs: list[Tensor], *, sampling: bool, logits: bool, float64: bool = False) -> KernelCall:
    attributes = {"block_size": BLOCK, "sampling": sampling, "float64_noise": float64, "write_logits": logits}
    return KernelCall(MARKOV_SAMPLING, inputs if sampling else inputs[:4], **attributes)


def torch_chain(base: Tensor, anchors: Tensor, embed: Tensor, head: Tensor, *_: Tensor) -> Tensor:
    previous, tokens = anchors, []
    for i in range(BLOCK):
        bias = torch.nn.functional.linear(embed[previous.long()], head)
        previous = (base[:, i] + bias.float()).argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1).to(torch.int32)


@triton.jit
def _step(
    base, anchors, embed, head, best, step, requests,
    vocab: tl.constexpr, rank: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.arange(0, rank)
    weights = tl.load(head + row[:, None] * rank + channel[None, :], row[:, None] < vocab, 0.0)
    request = tl.arange(0, padded)
    used = request < requests
    if step == 0:
        token = tl.load(anchors + request, used, 0).to(tl.int64)
    else:
        token = vocab - 1 - (tl.load(best + (step - 1) * requests + request, used, vocab - 1) & 0xFFFFFFFF)
    feature = tl.load(embed + token[:, None] * rank + channel[None, :], used[:, None], 0.0)
    if padded == 1:
        bias = tl.sum(weights.to(tl.float32) * feature.to(tl.float32), 1)[:, None]
    else:
        bias = tl.dot(weights, tl.trans(feature))
    place = (request[None, :] * block + step) * vocab + row[:, None]
    score = bias + tl.load(base + place, used[None, :] & (row[:, None] < vocab), float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = (ordered << 32) | (vocab - 1 - row).to(tl.int64)[:, None]
    tl.atomic_max(best + step * requests + request, tl.max(packed, 0), used)


def triton_chain(inputs: list[Tensor], tile: tuple[int, int]) -> tuple[Launch, Tensor]:
    """One fill, then a kernel a step; the tokens are in the low halves of the second result."""
    base, anchors, embed, head = inputs[:4]
    requests, (rows, warps) = len(anchors), tile
    best = torch.empty(BLOCK, requests, dtype=torch.int64, device="cuda")
    grid = (triton.cdiv(VOCAB, rows),)

    def launch() -> None:
        best.fill_(torch.iinfo(torch.int64).min)
        for step in range(BLOCK):
            _step[grid](
                base, anchors, embed, head, best, step, requests,
                VOCAB, RANK, BLOCK, rows, 1 if requests == 1 else 16, num_warps=warps,
            )  # fmt: skip

    return launch, best


time_chain = partial(time_sets, warm_calls=WARM_CALLS // 4)
"""A chain takes longer than most operations, so fewer of them make a warm graph."""


def check_peers(inputs: list[Tensor], wanted: Tensor) -> None:
    """A peer that computes something else is no peer; sums in another order may move a very close decision."""
    launch, best = triton_chain(inputs, TILES[0])
    launch()
    exact = torch_chain(*inputs[:2], *(table.float() for table in inputs[2:4]))
    found = {"torch": exact, "Triton": (VOCAB - 1 - (best & 0xFFFFFFFF)).T.to(torch.int32)}
    for name, tokens in found.items():
        same = float((tokens == wanted).double().mean())
        if same < 0.8:
            raise RuntimeError(f"{name} chooses other tokens for {len(tokens)} requests: {same:.0%} equal")


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    torch.manual_seed(0)
    report = Report()
    replays = 20 if arguments.quick else 50
    variants: dict[str, dict[str, bool]] = {
        "markov_sampling": {"sampling": False, "logits": False},
        "markov_sampling_with_logits": {"sampling": False, "logits": True},
        "markov_sampling_drawn": {"sampling": True, "logits": True},
        "markov_sampling_drawn_in_float64": {"sampling": True, "logits": True, "float64": True},
    }
    for requests in REQUESTS:
        sets = [inputs_of(requests) for _ in range(cold_sets(VOCAB * RANK * 2))]
        first = kernel_call(sets[0], sampling=False, logits=False)
        check_peers(sets[0], first.run()[0])
        table, logits = sets[0][3].nbytes, sets[0][0].nbytes
        for cache in ("cold", "warm"):
            for name, kind in variants.items():
                # The embedding rows, tokens and candidates are nothing beside these.
                moved = BLOCK * table + logits * (2 if kind["logits"] else 1)
                ours = time_chain(lambda one, kind=kind: kernel_call(one, **kind).launch, sets, cache, replays)
                peers = {}
                if name == "markov_sampling":
                    peers["torch eager"] = time_chain(
                        lambda one: lambda: torch_chain(*one), sets, cache, replays
                    ).median_us
                    if not arguments.quick:
                        compiled = torch.compile(torch_chain, dynamic=False)
                        peers["torch.compile"] = time_chain(
                            lambda one, f=compiled: lambda: f(*one), sets, cache, replays
                        ).median_us
                    peers["simple Triton"] = min(
                        time_chain(lambda one, tile=tile: triton_chain(one, tile)[0], sets, cache, replays).median_us
                        for tile in TILES
                    )
                facts: dict[str, Any] = {"rows": requests * BLOCK, "hidden": RANK, "cache": cache, "vocab": VOCAB}
                report.add(name, ours, moved_bytes=moved, peers=peers, **facts)
    scores = [torch.randn(BLOCK, VOCAB, device="cuda") for _ in range(60)]
    argmax = time_graph([lambda one=one: one.argmax(-1) for one in scores], replays)
    report.summary["torch_argmax_of_5_rows_us"] = round(argmax.median_us, 2)
    report.write(arguments.output)


if __name__ == "__main__":
    main()
