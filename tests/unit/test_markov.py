"""The Markov loop's other heads, vocabularies and candidates (rows SMP-5, SMP-7, SMP-8, SMP-10)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from dspark_trt.builder.config import ConfigError, HeadKind
from dspark_trt.builder.model.markov import (
    MarkovOptions,
    draft_block,
    draft_offsets_to_ids,
    largest,
    transform_logits,
)
from dspark_trt.plugins.markov_sampling import DRAFT_SALT, draw
from torch import Tensor

from tests.markov_examples import RANK, RELEASED, B, R, V, equal, head_of, inputs, operation

both = pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
modes = pytest.mark.parametrize("mode", ["greedy", "sampled", "sampled in float64"])

# Vocabularies and candidates ----------------------------------------------------------------------------


@modes
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
def test_options_that_change_nothing(options: MarkovOptions, mode: str) -> None:
    """SMP-7, SMP-8: the operation's results to the bit for the identity map and for k = V, ties and NaN included."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    base[0] = 1.0
    base[1, :, 3] = math.nan
    head.head.weight[5:9] = head.head.weight[5]
    used, float64 = None if mode == "greedy" else keys, "float64" in mode
    wanted = operation(head, base, anchors, used, float64=float64)
    options = dataclasses.replace(options, float64_noise=float64)
    found = draft_block(head, options, base, hidden, anchors, used)
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
    tokens, features, corrected = draft_block(head, MarkovOptions(), base, hidden, anchors)
    linear = head.gate_proj if kind == "gated" else head.joint_proj
    w1, w2, mix, mix_bias = (t.double() for t in (head.embed.weight, head.head.weight, linear.weight, linear.bias))

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


@pytest.mark.parametrize("through", [False, True], ids=["bias as it is", "bias transformed"])
@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (1.0, 2.0), (3.0, 2.5)])
def test_transform_of_the_bias(scale: float, cap: float | None, through: bool) -> None:
    """x -> c tanh(s x / c) of the bias alone, or nothing; the base logits have been through it before."""
    options = {"logit_scale": scale, "logit_softcap": cap, "apply_output_logit_transform": through}
    head, plain = head_of(**options), head_of()
    base, hidden, anchors, keys = inputs()
    tokens, features, corrected = draft_block(head, MarkovOptions(), base, hidden, anchors, keys)
    before = torch.cat((anchors.unsqueeze(1), tokens[:, :-1]), 1)
    bias = plain.embed.weight[before.long()].double() @ plain.head.weight.double().T
    if through:
        bias = scale * bias if cap is None else cap * torch.tanh(scale * bias / cap)
    # A float32 sum of numbers of size ten.
    assert torch.allclose(corrected.double(), base.double() + bias, atol=3e-6)
    assert torch.equal(features, plain.embed.weight[before.long()])
    assert transform_logits(RELEASED, base) is base
    if not through:
        assert equal((tokens, features, corrected), operation(plain, base, anchors, keys))


def test_sampler_hook_of_drafting() -> None:
    """It gets each slot's key and may write the distribution it draws from into the draft logits."""
    head = head_of()
    base, hidden, anchors, keys = inputs()
    seen: list[Tensor] = []

    def watermark(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        assert salt == DRAFT_SALT and torch.equal(seeds, keys[2]) and torch.equal(temperature, keys[1])
        seen.append(positions)
        logits[:, ::2] = -torch.inf
        return draw(logits, temperature, seeds, positions, salt=salt)

    tokens, _, corrected = draft_block(head, MarkovOptions(), base, hidden, anchors, keys, sampler=watermark)
    assert tokens.remainder(2).eq(1).all() and corrected[..., ::2].eq(-torch.inf).all()
    assert torch.equal(torch.stack(seen, 1), keys[0].unsqueeze(1) + torch.arange(B))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MarkovOptions(top_k=V + 1), "top_k is 24, expected 0..23"),
        (MarkovOptions(top_k=-1), "top_k is -1"),
        (MarkovOptions(bigrams=2), "bigrams is 2, expected 0..23 beside a top_k"),
        (MarkovOptions(draft_ids=(1, 1, V)), r"3 ids, 1 of them twice, outside: \[23\]"),
        (MarkovOptions(draft_ids=(1, 2), top_k=3), r"top_k is 3, expected 0\.\.2"),
    ],
)
def test_impossible_options(options: MarkovOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.checked(RELEASED)


def test_bigrams_want_a_vanilla_head() -> None:
    with pytest.raises(ConfigError, match="bias of the previous token alone, the head is rnn"):
        MarkovOptions(top_k=3, bigrams=2).checked(dataclasses.replace(RELEASED, markov_head="rnn"))
