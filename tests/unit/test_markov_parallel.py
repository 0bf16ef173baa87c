"""The Markov loop split over ranks: which loop is chosen, and that all give the same (rows SMP-2, SMP-6, SMP-9)."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import load_shard, rank_file_name
from dspark_trt.builder.config import ConfigError, DraftConfig, Numerics
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.draft import DraftModel
from dspark_trt.builder.model.markov import MarkovOptions
from dspark_trt.builder.model.markov_parallel import (
    Loop,
    LoopPlan,
    gathered_rows,
    owned_requests,
    plan_loops,
    split_by_requests,
    vocabulary_shard,
)
from dspark_trt.builder.network import load_network
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
from dspark_trt.plugins.op import OpError
from torch import Tensor

from tests.configs import TinyCheckpoint, draft_rings
from tests.markov_examples import RELEASED, R, V, drawn_kinds, equal, head_of, inputs, operation
from tests.oracle.comparison import two_steps
from tests.oracle.lockstep import run_ranks
from tests.thread_ranks import on_ranks

modes = pytest.mark.parametrize("mode", ["greedy", "sampled", "sampled in float64"])


def plan(
    options: MarkovOptions | None = None, *, draft: DraftConfig = RELEASED, tp_size: int = 2, **flags: Any
) -> LoopPlan:
    thresholds = {"vocabulary_from": 2, "requests_from": 8, **flags}
    return plan_loops(draft, options or MarkovOptions(), tp_size=tp_size, rank=0, **thresholds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_logits": True}, "every rank keeps the draft logits"),
        ({"online_acceptance": True}, "online acceptance estimator"),
        ({"options": MarkovOptions(top_k=4)}, "top-k Markov"),
        ({"draft": dataclasses.replace(RELEASED, markov_head="rnn")}, "the rnn head has a loop of its own"),
        ({"draft": dataclasses.replace(RELEASED, logit_scale=2.0)}, "transforms its logits has a loop of its own"),
        ({"options": MarkovOptions(draft_ids=(1,))}, "reduced draft vocabulary is not sharded"),
        ({"tp_size": 1}, "there is one"),
    ],
)
def test_loops_that_can_not_be_split(change: dict[str, Any], message: str) -> None:
    """Never, whatever the number of requests, and one line says why."""
    found = plan(**change)
    assert message in found.reason and "\n" not in str(found) and str(found).endswith(found.reason)
    assert {found.loop(n) for n in (1, 2, 8, 64)} == {Loop.WHOLE}


def test_loops_by_number_of_requests() -> None:
    """A threshold counts itself in, 0 is never, and the larger numbers are split by requests."""
    found = plan(MarkovOptions(float64_noise=True))
    assert [found.loop(n) for n in (1, 2, 7, 8, 64)] == [
        *(Loop.WHOLE, Loop.BY_VOCABULARY, Loop.BY_VOCABULARY),
        *(Loop.BY_REQUESTS, Loop.BY_REQUESTS),
    ]
    assert str(found) == (
        "from 2 requests on each rank runs the loop on its part of the vocabulary; "
        "from 8 requests on each rank runs the loop of its requests"
    )
    assert plan(requests_from=0).loop(64) is Loop.BY_VOCABULARY and plan(vocabulary_from=0).loop(7) is Loop.WHOLE
    never = plan(vocabulary_from=0, requests_from=0)
    assert never.loop(64) is Loop.WHOLE and str(never) == "every rank runs the whole loop: both thresholds are 0"
    for name in ("vocabulary_split_from", "request_split_from"):
        with pytest.raises(ConfigError, match=f"{name} is -1, expected a number of requests, or 0 for never"):
            BuildConfig(**{name: -1}).checked(RELEASED)


def test_the_choice_is_logged_once(tiny: Callable[..., TinyCheckpoint], caplog: pytest.LogCaptureFixture) -> None:
    """At load, on rank 0 of several alone."""
    checkpoint = tiny("v4.1")
    build = BuildConfig(max_batch_size=2, vocabulary_split_from=1)
    with caplog.at_level(logging.INFO, logger="dspark_trt"):
        for rank in range(2):
            load_network("draft", checkpoint.shards(2), rank, build)
            load_network("target", checkpoint.shards(2), rank, build)
        load_network("draft", checkpoint.shards(), 0, build)
        load_network("draft", checkpoint.shards(2), 0, dataclasses.replace(build, sampling=True))
    assert [r.getMessage() for r in caplog.records if "draft sampling" in r.getMessage()] == [
        "draft sampling on 2 ranks in torch: from 1 requests on each rank runs the loop on its part of the vocabulary",
        "draft sampling on 2 ranks in torch: every rank runs the whole loop: every rank keeps the draft logits, "
        "a split loop has them in parts",
    ]


def test_shards_of_a_table() -> None:
    """Parts of the table itself, fewer rows at its end, and a row of zeros where there is none."""
    table = torch.arange(10.0).view(5, 2)
    parts = [vocabulary_shard(table, 3, rank) for rank in range(3)]
    assert torch.equal(torch.cat(parts), table) and [len(part) for part in parts] == [2, 2, 1]
    assert [part.data_ptr() - table.data_ptr() for part in parts] == [0, 16, 32]
    assert vocabulary_shard(table[:1], 2, 1).tolist() == [[0, 0]]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("requests", [1, 2, 3, 7, 8])
def test_maps_of_owners(requests: int, tp: int) -> None:
    """Rank i mod tp owns request i, everybody has as many rows, and gathered rows come back in order."""
    owned = owned_requests(requests, tp)
    assert owned.shape == (tp, math.ceil(requests / tp))
    assert sorted(owned[owned >= 0].tolist()) == list(range(requests))
    assert all(int(i) % tp == rank for rank in range(tp) for i in owned[rank] if i >= 0)
    assert torch.equal(owned.flatten()[gathered_rows(requests, tp)], torch.arange(requests))


def split_by_vocabulary(
    shard: Tensor,
    tables: tuple[Tensor, Tensor],
    anchors: Tensor,
    keys: Any,
    tp: int,
    rank: int,
    *,
    float64: bool = False,
) -> Any:
    """The operation on a rank's part of the base logits and, of ``tables``, on W1 and its part of W2."""
    return MARKOV_SAMPLING_SHARDED(
        shard,
        anchors,
        *tables,
        *(keys or ()),
        *([torch.zeros(tp, 2, dtype=torch.int32)] if tp > 1 else []),
        block_size=shard.shape[1],
        sampling=keys is not None,
        float64_noise=float64 and keys is not None,
        tp_size=tp,
        rank=rank,
    )


def shard_of(tensor: Tensor, tp: int, rank: int, dim: int, *, padded: bool = True) -> Tensor:
    """A rank's part of the vocabulary; what is missing to a whole part is garbage that must not be seen, or no row."""
    width = math.ceil(V / tp)
    missing = width * tp - V
    if not padded and rank * width < V:
        return tensor.narrow(dim, rank * width, min(width, V - rank * width))
    shape = [missing if d == dim % tensor.dim() else n for d, n in enumerate(tensor.shape)]
    return torch.cat((tensor, torch.full(shape, 1e4, dtype=tensor.dtype)), dim).narrow(dim, rank * width, width)


def awkward(base: Tensor, tp: int) -> None:
    """Ties across a rank border, constant rows, winners at V - 1, NaN and infinities."""
    border = math.ceil(V / tp)
    base[0] = 0.0
    base[1, :, [border - 1, min(border, V - 1)]] = 90.0
    base[2, :, V - 1] = 99.0
    base[3, 0] = math.nan
    base[3, 1] = -math.inf
    base[3, 2] = math.inf
    base[3, 3, 0] = math.nan


@modes
@pytest.mark.parametrize("way", ["requests", "vocabulary"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [True, False])
def test_split_loops_equal_the_whole(tp: int, way: str, mode: str, padded: bool) -> None:
    """SMP-6, SMP-9: to the bit on every rank, for counts that do and do not split, also V = 23 on 2, 3 and 4 ranks."""
    head = head_of()
    head.head.weight[::3] = 0.0
    float64 = "float64" in mode
    for count in (1, 2, R):
        base, _, anchors, keys = inputs(count)
        awkward(base, tp)
        base, anchors = base[:count], anchors[:count]
        used = None if mode == "greedy" else tuple(k[:count] for k in keys)
        tokens, features, _ = operation(head, base, anchors, used, float64=float64)
        confidence = features.float().sum(-1)

        def own(whole: Tensor, rows: Tensor, anchors: Tensor = anchors, used: Any = used) -> tuple[Tensor, Tensor]:
            own_keys = used and tuple(k[rows] for k in used)
            mine, feature, _ = operation(head, whole, anchors[rows], own_keys, float64=float64)
            return mine, feature.float().sum(-1)

        def work(rank: int, base: Tensor = base, anchors: Tensor = anchors, used: Any = used, own: Any = own) -> Any:
            torch.manual_seed(rank)
            torch.rand(rank + 1)  # SMP-2: ranks are in different random states
            shard = shard_of(base, tp, rank, 2, padded=padded)
            if way == "requests":
                return split_by_requests(shard, V, own, tp_size=tp, rank=rank)
            tables = (head.embed.weight, shard_of(head.head.weight, tp, rank, 0, padded=padded))
            found = split_by_vocabulary(shard, tables, anchors, used, tp, rank, float64=float64)
            return found[0], found[1].float().sum(-1)

        for found in run_ranks(tp, work):
            assert torch.equal(found[0], tokens) and torch.equal(found[1], confidence)


def test_vocabulary_split_of_special_sizes() -> None:
    """SMP-6: constant logits and winners at V - 1 where blocks and ranks end, by value and id apart."""
    pick = random.Random(0)
    for vocab in (1, 2, 2047, 2048, 2049):
        for winner in {0, vocab - 1, pick.randrange(vocab)}:
            base = torch.zeros(1, 1, vocab)
            base[..., winner] = 1.0
            width = math.ceil(vocab / 2)
            padded = torch.nn.functional.pad(base, (0, 2 * width - vocab), value=9.0)
            table = torch.zeros(2 * width, 1)

            def work(rank: int, padded: Tensor = padded, table: Tensor = table, v: int = vocab, w: int = width) -> Any:
                part = slice(rank * w, (rank + 1) * w)
                tables = (table[:v], table[part])
                return split_by_vocabulary(padded[..., part], tables, torch.zeros(1).int(), None, 2, rank)

            assert [int(tokens) for tokens, _ in run_ranks(2, work)] == [winner] * 2


def test_parts_that_are_not_the_rank_s_are_refused() -> None:
    """Rows of another share would give every token another id."""
    table, keys = torch.zeros(10, 4), None

    def call(rows: int, tp: int, rank: int) -> Any:
        return split_by_vocabulary(torch.zeros(1, 2, rows), (table, table[:rows]), torch.zeros(1).int(), keys, tp, rank)

    for rows, tp, rank, message in (
        (6, 2, 0, r"head has 6 rows, expected 5\.\.5 of 10 on rank 0 of 2"),
        (2, 4, 2, r"head has 2 rows, expected 3\.\.3 of 10 on rank 2 of 4"),
        (4, 4, 3, r"head has 4 rows, expected 1\.\.3 of 10 on rank 3 of 4"),
        (5, 2, 2, r"rank is 2 of 2, expected 0\.\.1"),
    ):
        with pytest.raises(OpError, match=f"MarkovSamplingSharded: {message}"):
            call(rows, tp, rank)
    with pytest.raises(OpError, match="of 2 ranks has no body in ONNX; export MarkovSampling"):
        values = {"block_size": 2, "sampling": False, "float64_noise": False, "tp_size": 2, "rank": 0}
        MARKOV_SAMPLING_SHARDED.onnx_function(MARKOV_SAMPLING_SHARDED.attributes_type(**values), torch.float32)


@pytest.mark.parametrize("requests", [1, 5])
def test_an_all_to_all_is_used_where_there_is_one(requests: int) -> None:
    """The logits go by it and nothing but tokens and confidence by the gather."""
    base = inputs(0)[0][:requests]

    def rank_main(communicator: Any) -> Any:
        gathered, rank = [], communicator.rank

        def all_gather(tensor: Tensor) -> Tensor:
            gathered.append(tensor.numel())
            return communicator.all_gather(tensor)

        def all_to_all(tensor: Tensor) -> Tensor:
            return communicator.all_gather(tensor)[:, rank]

        def own_block(whole: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            assert whole.is_contiguous() and torch.equal(whole, base[rows])
            return rows.int().unsqueeze(1).expand(-1, whole.shape[1]), whole.sum(-1)

        with collective_scope(all_gather, all_to_all):
            shard = shard_of(base, 2, rank, 2, padded=False)
            return split_by_requests(shard, V, own_block, tp_size=2, rank=rank), gathered

    for (tokens, confidence), gathered in on_ranks(2, rank_main):
        assert torch.equal(tokens[:, 0], torch.arange(requests).int()) and torch.equal(confidence, base.sum(-1))
        assert gathered == [-(-requests // 2) * 2 * base.shape[1]]


# In the network -----------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("variant", ["v4", "v4.1"])
def test_split_loops_of_a_draft(tiny: Callable[..., TinyCheckpoint], variant: str, mode: str) -> None:
    """SMP-9: tokens and confidence of three requests on two ranks, to the bit whichever loop; logits with the whole."""
    checkpoint = tiny(variant, dspark_sample_from_anchor=variant == "v4.1")
    sampling, first = mode != "greedy", two_steps(checkpoint)[0]
    temperature, seeds = torch.tensor([0.9, 0.0, 1.4]), torch.arange(6).view(3, 2).int()
    keys = {"temperature": temperature, "seeds": seeds} if sampling else {}

    config = checkpoint.draft_config

    def run(thresholds: tuple[int, int], tp: int = 2) -> list[Any]:
        path = checkpoint.shards(tp)

        def work(rank: int) -> Any:
            loops = LoopPlan(tp_size=tp, rank=rank, vocabulary_from=thresholds[0], requests_from=thresholds[1])
            context = BuildContext(Numerics.RELEASED, torch.bfloat16, tp)
            options = MarkovOptions(float64_noise="float64" in mode)
            model = DraftModel(config, context, sampling=sampling, markov=options, loops=loops)
            load_shard(model, path / rank_file_name(rank), network="draft")
            mailbox = torch.zeros(tp, 2, dtype=torch.int32) if tp > 1 else None
            rings = draft_rings(model.eval(), slots=4)
            return model(*first.tensors(torch.bfloat16), rings, mailbox, **keys)[:3]

        with drawn_kinds() as kinds:
            results = run_ranks(tp, work)
        assert kinds == ({"float64" in mode} if sampling else set())
        return results

    (tokens, confidence, logits), other = run((0, 0))
    assert equal(other[:2], (tokens, confidence)) and (logits is not None) == sampling
    for thresholds in ((1, 0), (0, 1), (0, 3), (1, 4)):
        for found in run(thresholds):
            assert found[2] is None, "a split loop has no logits"
            assert equal(found[:2], (tokens, confidence)), thresholds
    (alone,), (by_requests,), (by_vocabulary,) = (run(t, tp=1) for t in ((0, 0), (0, 1), (1, 0)))
    assert equal(by_requests[:2], alone[:2]) and equal(by_vocabulary[:2], alone[:2])
