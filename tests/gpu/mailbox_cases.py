"""Calls of the fused all-reduce whose outputs are known exactly.

What every rank must write: the one-rank kernel, applied to the rank-ordered sum of what the ranks
published, has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dspark_trt.plugins import mhc_all_reduce as layout
from dspark_trt.plugins.markov_sampling_sharded import GENERATIONS, MAX_REQUESTS, MAX_STEPS
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.runtime_py.mailbox import Mailbox, region_bytes, slot_bytes
from torch import Tensor

from tests.gpu.kernel_call import KernelCall, bits
from tests.gpu.random_replays import values_that_differ
from tests.op_examples import UNQUANTIZED

EPS = 1e-6


class Regions:
    """Regions, mailbox tensors and streams of ranks that share one GPU."""

    def __init__(self, ranks: int, hidden: int, dtype: torch.dtype, timeout_ms: int = 3000):
        self.hidden, self.dtype = hidden, dtype
        self.integer = torch.int16 if dtype.itemsize == 2 else torch.int32
        size = region_bytes(ranks, hidden, dtype)
        self._slots_end = layout.MAILBOX_HEADER_BYTES + slot_bytes(ranks, hidden, dtype)
        self.regions = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        addresses = [region.data_ptr() for region in self.regions]
        self.tables = []
        for rank in range(ranks):
            header = {"rank": rank, "ranks": ranks, "hidden": hidden, "channel_bytes": dtype.itemsize}
            for name, value in {**header, "timeout_ms": timeout_ms}.items():
                self.word(rank, name).fill_(value)
            self.slots(rank).fill_(torch.iinfo(self.integer).min)
            own_first = torch.tensor(addresses[rank:] + addresses[:rank], dtype=torch.int64)
            self.tables.append(own_first.view(torch.int32).view(ranks, 2).cuda())

    def word(self, rank: int, name: str) -> Tensor:
        return self.regions[rank][: layout.MAILBOX_HEADER_BYTES].view(torch.int32)[layout.MAILBOX_WORDS[name]]

    def slots(self, rank: int) -> Tensor:
        return self.regions[rank][layout.MAILBOX_HEADER_BYTES : self._slots_end].view(self.integer)

    def candidates(self, rank: int) -> Tensor:
        """Words [generation, step, request, source rank] of sampling."""
        words = self.regions[rank][self._slots_end :].view(torch.int64)
        return words.view(GENERATIONS, MAX_STEPS, MAX_REQUESTS, len(self.regions))

    def launch(self, calls: Sequence[KernelCall]) -> None:
        """Enqueue a call of each rank on its stream."""
        for stream, call in zip(self.streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call.launch()


def payload(kind: str, generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A rank's partial sums [rows, H] of one kind (TP-2)."""
    x = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    coin = torch.rand(shape, device="cuda", generator=generator) < 0.5
    if kind == "all -0.0":
        return torch.full_like(x, -0.0)
    if kind == "half -0.0":
        return torch.where(coin, torch.full_like(x, -0.0), x)
    if kind == "denormal":
        bottom = torch.randint(1, 100, shape, device="cuda", generator=generator)
        return bottom.to(torch.int16 if dtype.itemsize == 2 else torch.int32).view(dtype)
    if kind in ("any bits", "nan"):
        integer = torch.int16 if dtype.itemsize == 2 else torch.int32
        ends = (-(2**15), 2**15) if dtype.itemsize == 2 else (-(2**31), 2**31)
        drawn = torch.randint(*ends, shape, device="cuda", generator=generator).to(integer)
        if kind == "any bits":
            return drawn.view(dtype)
        exponent = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}[dtype]
        return torch.where(coin, (drawn | exponent | 1).view(dtype), x)
    return x


KINDS = ("normal", "all -0.0", "half -0.0", "denormal", "nan", "any bits", "opposite")


def payloads(kind: str, seed: int, ranks: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """What each rank publishes; every rank draws all of them, on its own GPU, with the same bits."""
    parts = []
    for rank in range(ranks):
        generator = torch.Generator("cuda").manual_seed(seed * ranks + rank)
        parts.append(payload(kind, generator, shape, dtype))
    if kind == "opposite":
        parts[1] = -parts[0]
    return parts


def rank_ordered_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].float() + 0.0  # -0.0 is published as +0.0
    for part in parts[1:]:
        total = total + (part.float() + 0.0)
    return total.to(parts[0].dtype)


class Case:
    """One call of the fused operation on one rank, and the outputs it must give.

    Args:
        table: the rank's mailbox tensor [ranks, 2].
        seed: of all random inputs; the same on every rank.
    """

    def __init__(
        self, table: Tensor, rank: int, kind: str, seed: int, shape: tuple[int, int], dtype: torch.dtype, residual: bool
    ):
        rows, hidden = shape
        ranks = table.shape[0]
        parts = payloads(kind, seed, ranks, shape, dtype)
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.rand(shape, device="cuda", generator=generator)

        rest = [draw(rows, 4, hidden).sub(0.5).to(dtype), draw(rows, 4), draw(rows, 4, 4)]
        rest += [] if residual else [draw(rows, 4), draw(hidden).to(dtype)]
        self.label = f"{kind}, {rows} rows, {dtype}, residual_only {residual}, seed {seed}"
        op = MHC_ALL_REDUCE_RESIDUAL_ONLY if residual else MHC_ALL_REDUCE
        attributes = {} if residual else {"norm_eps": EPS, **UNQUANTIZED}
        alone = KernelCall(op, [rank_ordered_sum(parts), *rest], tp_size=1, **attributes)
        self.expected = [t.clone() for t in alone.run()]
        self.fused = KernelCall(op, [parts[rank], *rest, table], tp_size=ranks, **attributes)

    def differences(self) -> Tensor:
        """How many values differ in their bits, on the GPU; any NaN is as good as another."""
        pairs = zip(self.fused.outputs, self.expected, strict=True)
        return torch.stack([((bits(a) != bits(b)) & ~(a.isnan() & b.isnan())).sum() for a, b in pairs]).sum()

    def check(self) -> None:
        differing = int(self.differences())
        assert differing == 0, f"{differing} values differ: {self.label}"

    def run(self) -> None:
        self.fused.run()
        self.check()

    def launch(self) -> None:
        self.fused.launch()


def values_that_differ_in_100_000_calls(box: Mailbox, rank: int, seed: int, hidden: int) -> int:
    """TP-1, TP-4: two graphs of fifty bfloat16 calls; row counts jump from call to call."""
    rows = [r for i in range(1, 26) for r in (i, 41 - i)]

    def case(which: int, i: int) -> Case:
        kind, shape = KINDS[(i + which) % len(KINDS)], (rows[i], hidden)
        return Case(box.tensor, rank, kind, seed + 100 * which + i, shape, torch.bfloat16, i % 3 == 2)

    sets = [[case(which, i) for i in range(len(rows))] for which in range(2)]
    return values_that_differ(box, sets, 2000, seed)
