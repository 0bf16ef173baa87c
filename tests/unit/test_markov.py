"""The Markov loop's other heads, vocabularies and candidates, and its splits over ranks (rows SMP-2, SMP-5 - 9)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.builder.checkpoint.tensor_file import CheckpointError
from dspark_trt.builder.config import ConfigError, Numerics
from dspark_trt.builder.engine import BuildConfig
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.markov import (
    HeadKind,
    MarkovHead,
    MarkovOptions,
    draft_block,
    draft_offsets_to_ids,
    largest,
    sample_tokens,
)
from dspark_trt.builder.model.markov_parallel import (
    gathered_rows,
    owned_requests,
    split_by_requests,
    split_by_vocabulary,
    why_not_sharded,
)
from dspark_trt.builder.network import load_network
from dspark_trt.builder.onnx_export import ExportError, export_network
from dspark_trt.plugins.markov_sampling import DRAFT_SALT, MARKOV_SAMPLING
from dspark_trt.runtime_py.communicator import SingleProcess
from dspark_trt.runtime_py.session import TorchSession, make_caches, make_outputs
from torch import Tensor

from tests.configs import TinyCheckpoint
from tests.oracle.lockstep import run_ranks

V, B, RANK, H, R = 23, 5, 4, 6, 7


class Sizes:
    vocab_size, markov_rank, hidden_size = V, RANK, H


def head_of(kind: HeadKind = "vanilla", seed: int = 0) -> MarkovHead:
    """bfloat16 tables, whose products do not depend on the columns beside them."""
    head = MarkovHead(Sizes, BuildContext(Numerics.DEQUANTIZED, torch.bfloat16), kind)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def inputs(seed: int = 0, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Base logits, hidden rows, anchors, and keys with a greedy, a cold and warm requests."""
    generator = torch.Generator().manual_seed(seed)
    base, hidden = torch.randn(R, B, vocab, generator=generator), torch.randn(R, B, H, generator=generator)
    anchors = torch.randint(0, V, (R,), generator=generator).int()
    temperature = torch.tensor([0, 0.3, 1, 1, 1.7, 0, 1], dtype=torch.float32)
    seeds = torch.randint(-(2**31), 2**31, (R, 2), generator=generator).int()
    return base, hidden, anchors, (torch.arange(R).int() * 50, temperature, seeds)


def operation(head: MarkovHead, base: Tensor, anchors: Tensor, keys: tuple[Tensor, ...] | None) -> Any:
    tables = (head.embed.weight, head.head.weight)
    return MARKOV_SAMPLING(base, anchors, *tables, *(keys or ()), block_size=B, sampling=keys is not None)


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


both = pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])

# Vocabularies and candidates ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "options",
    [
        MarkovOptions(),
        MarkovOptions(top_k=V),
        MarkovOptions(top_k=V, bigrams=3),
        MarkovOptions(draft_ids=tuple(range(V))),
        MarkovOptions(draft_ids=tuple(range(V)), top_k=V),
    ],
    ids=str,
)
def test_options_that_change_nothing(options: MarkovOptions, sampling: bool) -> None:
    """SMP-7, SMP-8: the operation's results to the bit for the identity map and for k = V, ties and NaN included."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    base[0] = 1.0
    base[1, :, 3] = math.nan
    head.head.weight[5:9] = head.head.weight[5]
    wanted = operation(head, base, anchors, keys if sampling else None)
    found = draft_block(head, options, base, hidden, anchors, keys if sampling else None)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(found[2].nan_to_num(nan=9e9), wanted[2].nan_to_num(nan=9e9))


@both
def test_strided_logits(sampling: bool) -> None:
    """SMP-10: a [R, B, V] view of step-major logits gives what contiguous ones give."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    strided = base.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    for run in (
        lambda x, k: operation(head, x, anchors, k),
        lambda x, k: draft_block(head, MarkovOptions(), x, hidden, anchors, k),
    ):
        used = keys if sampling else None
        assert equal(run(strided, used), run(base, used))


@both
@pytest.mark.parametrize("ids", [(4, 9, 2, 22, 0), tuple(range(3, 11)), (7,)], ids=str)
def test_reduced_vocabulary(ids: tuple[int, ...], sampling: bool) -> None:
    """SMP-7: embedded by target id, biased by draft index, -inf elsewhere at every slot: what the whole vocabulary
    gives with the other base logits at -inf, ties by target id whatever the map's order."""
    head, index = head_of(), torch.tensor(ids)
    base, hidden, anchors, keys = inputs()
    base[0] = 1.0
    head.head.weight[index] = torch.where(torch.arange(len(ids)).unsqueeze(1) < 2, 0.5, head.head.weight[index])
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, index, False)
    wanted = operation(head, base.masked_fill(outside, -torch.inf), anchors, keys if sampling else None)
    found = draft_block(
        head, MarkovOptions(draft_ids=ids), base[..., index], hidden, anchors, keys if sampling else None
    )
    assert equal(found, wanted)
    assert found[2][..., outside].eq(-torch.inf).all() and set(found[0].flatten().tolist()) <= set(ids)


def test_draft_to_target_offsets() -> None:
    """Target id - draft id, as checkpoints store it."""
    assert draft_offsets_to_ids(torch.tensor([0, 2, 2, 5])) == [0, 3, 4, 8]


@both
def test_candidates(sampling: bool) -> None:
    """SMP-8: the k largest base logits of each slot, picked before the bias; ties at the k-th place to the lowest
    ids; nothing else is drafted, and the draft logits say so."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    base[2] = 0.0
    tokens, _, corrected = draft_block(head, MarkovOptions(top_k=3), base, hidden, anchors, keys if sampling else None)
    dense = operation(head, base, anchors, None)[2]
    for r in range(R):
        for i in range(B):
            candidates = sorted(range(V), key=lambda t: (-float(base[r, i, t]), t))[:3]
            assert corrected[r, i].isfinite().nonzero().flatten().tolist() == sorted(candidates)
            assert int(tokens[r, i]) in candidates
    assert torch.equal(corrected[:, 0][corrected[:, 0].isfinite()], dense[:, 0][corrected[:, 0].isfinite()])
    single, *_ = draft_block(head, MarkovOptions(top_k=1), base, hidden, anchors, keys if sampling else None)
    assert torch.equal(single, largest(base, 1).int().argmax(-1).int())


def test_bigrams_find_what_only_the_bias_lifts() -> None:
    """SMP-8: the winner of dense drafting, missed by the base logits' top-k, kept by the static table; a token that
    is in both sets is there once."""
    head = head_of()
    head.embed.weight.copy_(torch.nn.functional.one_hot(torch.arange(V) % RANK, RANK).float())
    head.head.weight.zero_()
    head.head.weight[17] = 30.0
    base, hidden, anchors, _ = inputs()
    base[..., 17] = -5.0
    dense, *_ = operation(head, base, anchors, None)
    assert dense.eq(17).all()
    missed, *_ = draft_block(head, MarkovOptions(top_k=3), base, hidden, anchors)
    assert missed.ne(17).all()
    found, _, corrected = draft_block(head, MarkovOptions(top_k=3, bigrams=1), base, hidden, anchors)
    assert torch.equal(found, dense) and corrected.isfinite().sum(-1).eq(4).all()
    base[..., 17] = 50.0
    assert draft_block(head, MarkovOptions(top_k=3, bigrams=1), base, hidden, anchors)[2].isfinite().sum(-1).eq(3).all()


# Heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_against_loops(kind: HeadKind) -> None:
    """Formulas of spec 5.1 in float64, element by element; the rnn's bias comes from before the state's update."""
    head = head_of(kind)
    base, hidden, anchors, _ = inputs()
    tokens, features, corrected = draft_block(head, MarkovOptions(head=kind), base, hidden, anchors)
    w1, w2, mix, mix_bias = (t.double() for t in (head.embed.weight, head.head.weight, head.mix.weight, head.mix_bias))

    def sigmoid(x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))

    for r in range(R):
        previous, state = int(anchors[r]), torch.zeros(RANK).double()
        for i in range(B):
            e, h = w1[previous], hidden[r, i].double()
            if kind == "gated":
                bias = w2 @ (sigmoid(mix @ torch.cat((h, e)) + mix_bias) * e)
            else:
                g, c, o = (mix @ torch.cat((state, e, h)) + mix_bias).split(RANK)
                bias = w2 @ torch.tanh(o)
                state = sigmoid(g) * state + (1 - sigmoid(g)) * torch.tanh(c)
            # Sums of a dozen float32 products of size one.
            assert torch.allclose(corrected[r, i].double(), base[r, i] + bias, atol=2e-5)
            assert torch.equal(features[r, i], head.embed.weight[previous])
            previous = int(tokens[r, i])
            assert previous == int(corrected[r, i].argmax())


def test_logit_scale() -> None:
    """A factor of the bias, not of the base logits."""
    head, plain = head_of(), head_of()
    plain.head.weight.mul_(0.5)
    base, hidden, anchors, keys = inputs()
    found = draft_block(head, MarkovOptions(logit_scale=0.5), base, hidden, anchors, keys)
    assert equal(found, operation(plain, base, anchors, keys))


def test_sampler_hook_of_drafting() -> None:
    """It gets each slot's key and may write the law it draws from into the draft logits."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    seen: list[Tensor] = []

    def watermark(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        assert salt == DRAFT_SALT and torch.equal(seeds, keys[2]) and torch.equal(temperature, keys[1])
        seen.append(positions)
        logits[:, ::2] = -torch.inf
        return sample_tokens(logits, temperature, seeds, positions, salt=salt)

    tokens, _, corrected = draft_block(head, MarkovOptions(), base, hidden, anchors, keys, sampler=watermark)
    assert tokens.remainder(2).eq(1).all() and corrected[..., ::2].eq(-torch.inf).all()
    assert torch.equal(torch.stack(seen, 1), keys[0].unsqueeze(1) + torch.arange(B))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MarkovOptions(top_k=V + 1), "top_k is 24, expected 0..23"),
        (MarkovOptions(top_k=-1), "top_k is -1"),
        (MarkovOptions(bigrams=2), "bigrams is 2, expected 0..23 beside a top_k"),
        (MarkovOptions(head="rnn", top_k=3, bigrams=2), "bias of the previous token alone, the head is rnn"),
        (MarkovOptions(draft_ids=(1, 1, V)), r"3 ids, 1 of them twice, outside: \[23\]"),
        (MarkovOptions(draft_ids=(1, 2), top_k=3), r"top_k is 3, expected 0\.\.2"),
    ],
)
def test_impossible_options(options: MarkovOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.checked(V)


# In the network -----------------------------------------------------------------------------------------


def one_step(network: Any) -> dict[str, Tensor]:
    session = TorchSession(network, SingleProcess())
    caches, sizes = make_caches(session), {"R": 2, "T": 6}
    given = dict(caches)
    for info in session.io.inputs:
        if info.name not in given:
            shape = [sizes[d] if isinstance(d, str) else d for d in info.shape]
            given[info.name] = torch.arange(math.prod(shape)).view(shape).remainder(7).to(info.dtype)
    given["feature_slots"] = torch.zeros(6, dtype=torch.int32)
    outputs = make_outputs(session, given, caches)
    session.run(given, outputs)
    return outputs


def test_options_in_a_draft(tiny: Callable[..., TinyCheckpoint], tmp_path: Path) -> None:
    """The whole network with options that change nothing, with a reduced vocabulary, and refused by the exporter."""
    shards, build = tiny("v4.1").shards(), BuildConfig(max_batch_size=2, sampling=True)

    def network(markov: MarkovOptions | None = None) -> Any:
        return load_network("draft", shards, 0, build, markov=markov)

    plain, vocab = one_step(network()), tiny("v4.1").draft_config.vocab_size
    everything = one_step(network(MarkovOptions(top_k=vocab)))
    assert all(torch.equal(plain[n], everything[n]) for n in ("draft_tokens", "confidence", "draft_logits"))
    odd = network(MarkovOptions(draft_ids=tuple(range(1, vocab, 2))))
    half = one_step(odd)
    assert half["draft_tokens"].remainder(2).eq(1).all()
    assert torch.equal(half["draft_logits"][:, 0, 1::2], plain["draft_logits"][:, 0, 1::2])
    with pytest.raises(ExportError, match=r"draft_ids=.*engines have the released Markov head only"):
        export_network(odd, tmp_path / "draft.onnx")
    hooked = network()
    hooked.model.sampler = lambda *tensors, salt: sample_tokens(*tensors, salt=salt)
    assert torch.equal(one_step(hooked)["draft_logits"], plain["draft_logits"])
    with pytest.raises(ExportError, match="a sampler of its own"):
        export_network(hooked, tmp_path / "draft.onnx")
    with pytest.raises(CheckpointError, match=r"markov_head\.mix"):
        network(MarkovOptions(head="gated"))
    assert not list(tmp_path.iterdir())


# Over ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        (MarkovOptions(), {}, None),
        (MarkovOptions(), {"draft_logits": True}, "draft logits"),
        (MarkovOptions(), {"online_acceptance": True}, "online acceptance"),
        (MarkovOptions(), {"own_sampler": True}, "sampler"),
        (MarkovOptions(top_k=4), {}, "top-k"),
        (MarkovOptions(head="rnn"), {}, "rnn head"),
        (MarkovOptions(draft_ids=(1,)), {}, "reduced"),
    ],
)
def test_why_not_sharded(options: MarkovOptions, flags: dict[str, bool], message: str | None) -> None:
    reason = why_not_sharded(options, **flags)
    assert (reason is None) == (message is None)
    assert reason is None or (str(message) in reason and "\n" not in reason)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("requests", [1, 2, 3, 7, 8])
def test_maps_of_owners(requests: int, tp: int) -> None:
    """Rank i mod tp owns request i, everybody has as many rows, and gathered rows come back in order."""
    owned = owned_requests(requests, tp)
    assert owned.shape == (tp, math.ceil(requests / tp))
    assert sorted(owned[owned >= 0].tolist()) == list(range(requests))
    assert all(int(i) % tp == rank for rank in range(tp) for i in owned[rank] if i >= 0)
    assert torch.equal(owned.flatten()[gathered_rows(requests, tp)], torch.arange(requests))


def shard_of(tensor: Tensor, tp: int, rank: int, dim: int) -> Tensor:
    """A rank's part of the vocabulary; what is missing to a whole part is garbage that must not be seen."""
    width = math.ceil(V / tp)
    missing = width * tp - V
    shape = [missing if d == dim % tensor.dim() else n for d, n in enumerate(tensor.shape)]
    return torch.cat((tensor, torch.full(shape, 1e4)), dim).narrow(dim, rank * width, width)


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


@both
@pytest.mark.parametrize("way", ["requests", "vocabulary"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_split_loops_equal_the_whole(tp: int, way: str, sampling: bool) -> None:
    """SMP-6, SMP-9: to the bit on every rank, for counts that do and do not split, also V = 23 on 2, 3 and 4 ranks."""
    head = head_of()
    head.head.weight[::3] = 0.0
    for count in (1, 2, R):
        base, _, anchors, keys = inputs(count)
        awkward(base, tp)
        base, anchors, used = base[:count], anchors[:count], tuple(k[:count] for k in keys) if sampling else None
        tokens, features, _ = operation(head, base, anchors, used)
        confidence = features.float().sum(-1)

        def own(whole: Tensor, rows: Tensor, anchors: Tensor = anchors, used: Any = used) -> tuple[Tensor, Tensor]:
            mine, feature, _ = operation(head, whole, anchors[rows], used and tuple(k[rows] for k in used))
            return mine, feature.float().sum(-1)

        def work(rank: int, base: Tensor = base, anchors: Tensor = anchors, used: Any = used, own: Any = own) -> Any:
            torch.manual_seed(rank)
            torch.rand(rank + 1)  # SMP-2: ranks are in different random states
            shard = shard_of(base, tp, rank, 2)
            if way == "requests":
                return split_by_requests(shard, V, own, tp_size=tp, rank=rank)
            rows = shard_of(head.head.weight, tp, rank, 0)
            found = split_by_vocabulary(shard, V, head.embed.weight, rows, anchors, used, tp_size=tp, rank=rank)
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
                shards = padded[..., rank * w : (rank + 1) * w], table[rank * w : (rank + 1) * w]
                return split_by_vocabulary(shards[0], v, table, shards[1], torch.zeros(1).int(), tp_size=2, rank=rank)

            assert [int(tokens) for tokens, _ in run_ranks(2, work)] == [winner] * 2
