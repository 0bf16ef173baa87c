"""Times the three ways in which two ranks can draft: the whole loop on each, split by requests, split by vocabulary.

    python tests/benchmarks/markov_loops.py --output FILE.json [--quick]

A split rank needs the base logits of its part of the vocabulary only, so a call is the product with the head and the
loop; ``*_without_head`` are the loops alone. Drafts are greedy, as split ones are. Both ranks replay the same graphs,
and the slower one counts. ``--quick`` takes fewer replays. The summary says how many requests each way is the quickest
for, and from how many on: what ``vocabulary_split_from`` and ``request_split_from`` of a build should be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dspark_trt.builder.model.markov_parallel import split_by_requests, vocabulary_shard
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.kernels import kernel_scope
from dspark_trt.plugins.markov_sampling import MARKOV_SAMPLING
from dspark_trt.plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from dspark_trt.plugins.numerics import matmul
from dspark_trt.runtime_py.mailbox import Mailbox
from dspark_trt.runtime_py.stock import DistributedGroup
from torch import Tensor

from tests.benchmarks.benchmark import WARM_CALLS, Report, Timing, argument_parser, cold_sets, time_graph
from tests.gpu.two_ranks import RANKS, StoreCommunicator, run_ranks

VOCAB, RANK, HIDDEN, BLOCK = 129280, 256, 5120, 5
REQUESTS = (1, 2, 4, 8, 16, 64)
WHOLE, BY_REQUESTS, BY_VOCABULARY = "markov_loop_whole", "markov_loop_by_requests", "markov_loop_by_vocabulary"
NAMES = (WHOLE, BY_REQUESTS, BY_VOCABULARY)
OPTIONS = {"block_size": BLOCK, "sampling": False, "float64_noise": False}
HEAD_BYTES, TABLE_BYTES = VOCAB * HIDDEN * 2, VOCAB * RANK * 2


@dataclass(frozen=True)
class Tables:
    """What every call reads, in buffers of its own where the cache is cold."""

    embed: Tensor
    head: Tensor
    head_part: Tensor
    """Rows of this rank: a view, as they are in a draft."""


@dataclass(frozen=True)
class Ways:
    """The three ways on one rank, as a draft has them."""

    rank: int
    head: Tensor
    """[V, H], larger than any cache."""
    mailbox: Tensor

    def logits(self, rows: Tensor, head: Tensor) -> Tensor:
        """Base logits [R, B, columns] of normed rows."""
        return matmul(rows, head).unflatten(0, (-1, BLOCK))

    def loop(self, name: str, base: Tensor, anchors: Tensor, tables: Tables) -> tuple[Tensor, ...]:
        """Tokens, and what else the way gives, from the base logits that it starts with."""
        found: tuple[Tensor, ...]
        if name == WHOLE:
            found = MARKOV_SAMPLING(base, anchors, tables.embed, tables.head, write_logits=False, **OPTIONS)
        elif name == BY_VOCABULARY:
            found = MARKOV_SAMPLING_SHARDED(
                base, anchors, tables.embed, tables.head_part, self.mailbox, tp_size=RANKS, rank=self.rank, **OPTIONS
            )
        else:

            def own_block(whole: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
                own = anchors[rows]
                tokens, _ = MARKOV_SAMPLING(whole, own, tables.embed, tables.head, write_logits=False, **OPTIONS)
                return tokens, torch.zeros_like(tokens, dtype=torch.float32)

            found = split_by_requests(base, VOCAB, own_block, tp_size=RANKS, rank=self.rank)
        return found

    def part(self, name: str) -> Tensor:
        """The rows of the head that the way's base logits come from."""
        return self.head if name == WHOLE else vocabulary_shard(self.head, RANKS, self.rank)


def moved_bytes(name: str, requests: int, *, with_head: bool) -> int:
    """What one rank reads and writes: its rows of the head, W2 once per step, and the logits as often as a way must."""
    share = 1 if name == WHOLE else RANKS
    logits = requests * BLOCK * VOCAB * 4 // share
    table = TABLE_BYTES // (RANKS if name == BY_VOCABULARY else 1)
    # By requests they are sent as well: read and written once more.
    loop = BLOCK * table + logits * (3 if name == BY_REQUESTS else 1)
    return loop + (HEAD_BYTES // share + logits if with_head else 0)


def check(ways: Ways, base: Tensor, anchors: Tensor, tables: Tables) -> None:
    """The ways choose the same tokens from the same logits."""
    part = vocabulary_shard(base.flatten(0, 1).t(), RANKS, ways.rank).t().unflatten(0, base.shape[:2]).contiguous()
    wanted = ways.loop(WHOLE, base, anchors, tables)[0]
    for name in (BY_REQUESTS, BY_VOCABULARY):
        if not torch.equal(ways.loop(name, part, anchors, tables)[0], wanted):
            raise RuntimeError(f"{name} chooses other tokens than {WHOLE} for {len(anchors)} requests")


def rank_main(communicator: StoreCommunicator, seed: int, *, output: Path, quick: bool) -> dict[str, Any]:
    """What each of the ranks runs."""
    rank = communicator.rank
    device = torch.device("cuda", rank)
    group = DistributedGroup(communicator, device)
    box = Mailbox.create(communicator, HIDDEN, torch.bfloat16, device, timeout_s=30)
    source = torch.Generator(device).manual_seed(seed)  # the same on both ranks

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=source, device=device, dtype=torch.bfloat16) * scale).contiguous()

    def tables_of() -> Tables:
        head = draw(VOCAB, RANK)
        return Tables(draw(VOCAB, RANK, scale=0.3), head, vocabulary_shard(head, RANKS, rank))

    ways = Ways(rank, draw(VOCAB, HIDDEN, scale=HIDDEN**-0.5), box.tensor)
    every_table = [tables_of() for _ in range(cold_sets(TABLE_BYTES // RANKS))]
    replays, report = 5 if quick else 30, Report()
    medians: dict[str, dict[int, float]] = {name: {} for name in NAMES}

    def slowest(launches: list[Callable[[], Any]]) -> Timing:
        own = time_graph(launches, replays, meet=communicator.barrier)
        everyone: list[Timing] = communicator.all_gather_object(own)
        return max(everyone, key=lambda t: t.median_us)

    with torch.inference_mode(), kernel_scope(), collective_scope(group.all_gather, group.all_to_all):
        for requests in REQUESTS:
            anchors = torch.randint(VOCAB, (requests,), generator=source, device=device, dtype=torch.int32)
            rows = draw(requests * BLOCK, HIDDEN)
            check(ways, ways.logits(rows, ways.head), anchors, every_table[0])
            for name in NAMES:
                head = ways.part(name)
                base = ways.logits(rows, head)
                # As many copies of the logits as their size asks for, and no more than there are tables.
                bases = [base.clone() for _ in range(min(len(every_table), cold_sets(base.nbytes)))]

                def call(tables: Tables, name: str, head: Tensor, anchors: Tensor, rows: Tensor) -> None:
                    ways.loop(name, ways.logits(rows, head), anchors, tables)

                for cache in ("cold", "warm"):
                    used = every_table if cache == "cold" else [every_table[0]] * (WARM_CALLS // 4)
                    count = len(bases) if cache == "cold" else 1
                    facts: dict[str, Any] = {"cache": cache, "ranks": RANKS, "rows": requests * BLOCK, "vocab": VOCAB}
                    with_head = slowest([partial(call, t, name, head, anchors, rows) for t in used])
                    alone = slowest(
                        [partial(ways.loop, name, bases[i % count], anchors, t) for i, t in enumerate(used)]
                    )
                    box.check()
                    if cache == "cold":
                        medians[name][requests] = with_head.median_us
                    if rank == 0:
                        size = moved_bytes(name, requests, with_head=True)
                        report.add(name, with_head, hidden=HIDDEN, moved_bytes=size, **facts)
                        size = moved_bytes(name, requests, with_head=False)
                        report.add(f"{name}_without_head", alone, hidden=RANK, moved_bytes=size, **facts)
                del bases
    report.summary |= summary(medians)
    if rank == 0:
        report.write(output)
    torch.cuda.synchronize()
    communicator.barrier()
    box.close()
    group.close()
    return report.summary


def summary(medians: dict[str, dict[int, float]]) -> dict[str, Any]:
    """The quickest way by request count, head product included and cold, and from which count on it is a split one.

    A way's start is the least count from which on no other way is quicker but those that start later; 0 is never.
    """
    by_count = {n: {name: of_way[n] for name, of_way in medians.items()} for n in sorted(medians[WHOLE])}
    quickest = {n: min(times, key=times.__getitem__) for n, times in by_count.items()}
    counts = list(quickest)
    starts = {}
    for names, key in (((BY_REQUESTS,), "request_split_from"), ((BY_VOCABULARY, BY_REQUESTS), "vocabulary_split_from")):
        start = 0
        for n in reversed(counts):
            if quickest[n] not in names:
                break
            start = n
        starts[key] = start
    if starts["vocabulary_split_from"] == starts["request_split_from"]:
        starts["vocabulary_split_from"] = 0
    return {"quickest": {str(n): name for n, name in quickest.items()}, **starts}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    work = partial(rank_main, output=arguments.output, quick=arguments.quick)
    print(run_ranks(work, 0, 150)[0])


if __name__ == "__main__":
    main()
