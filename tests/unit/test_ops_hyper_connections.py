"""Coefficients, collapse and boundary: faults that others shipped (rows HC-1 to HC-8), and the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from dspark_trt.builder.config import Variant
from dspark_trt.builder.model.hyper_connections import register_hc_head
from dspark_trt.plugins.collective import collective_scope
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.mhc_all_reduce import MHC_ALL_REDUCE, MHC_ALL_REDUCE_RESIDUAL_ONLY
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS, sum_over_streams
from dspark_trt.plugins.op import OpError
from torch import Tensor, nn

from tests.configs import VARIANTS, TinyCheckpoint, target_rings
from tests.op_examples import UNQUANTIZED, example
from tests.oracle import numpy_ops as ops

EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def from_logits(base: Tensor, **changed: float) -> tuple[Tensor, ...]:
    """pre, post, comb of rows whose 24 logits are ``base`` [24] alone."""
    streams = torch.ones(1, 4, 8)
    return MHC_COEFFICIENTS(streams, torch.zeros(24, 32), torch.ones(3), base, **{**EPS, **changed})


@pytest.mark.parametrize("hc_eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", ["row", "column", "both"])
def test_eps_stands_beside_the_sum(shape: str, hc_eps: float) -> None:
    """HC-1: x / (sum + eps), softmax + eps first, for a nearly empty row, column, or both."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    if shape != "column":
        logits[2, 1:] -= 40
    if shape != "row":
        logits[:, 3] -= 40
    base = torch.cat((torch.zeros(8), logits.flatten()))
    pre, _, comb = from_logits(base, hc_eps=hc_eps)
    wanted = ops.sinkhorn(logits.double().numpy(), hc_eps, 20)
    # Relative: entries of a nearly empty column are small before they are scaled up.
    assert np.abs(comb[0].double().numpy() / wanted - 1).max() < 2e-5
    assert torch.allclose(pre, torch.full((1, 4), 0.5 + hc_eps), rtol=1e-6, atol=0)
    k = np.exp(logits.double().numpy())
    k = k / k.sum(-1, keepdims=True)
    for axis in [-2, *[-1, -2] * 19]:
        k = k / k.sum(axis, keepdims=True) + hc_eps
    # Columns without a way in show the misplaced eps even at 1e-6.
    if shape != "row" or hc_eps > 1e-3:
        assert np.abs(k / wanted - 1).max() > 1e-3


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_large_logits_stay_finite(logit: float) -> None:
    """HC-2: the row maximum is subtracted; all equal, one large, alternating."""
    for pattern in ([logit] * 16, [logit] + [0.0] * 15, [logit, -logit] * 8):
        pre, post, comb = from_logits(torch.cat((torch.full((8,), logit), torch.tensor(pattern))))
        for value in (pre, post, comb):
            assert value.isfinite().all()
        assert (comb.sum(1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_bad_token_stays_alone(poison: float) -> None:
    """HC-2: a single channel of a single row."""
    one = example("MhcCoefficients v4.1", torch.bfloat16, rows=6)
    streams = one.tensors[0].clone()
    streams[3, 2, 17] = poison
    others = [0, 1, 2, 4, 5]
    for found, clean in zip(one.replaced(0, streams).run(), one.run(), strict=True):
        assert torch.equal(found[others], clean[others])
        assert not found[3].isfinite().all()


def test_first_index_of_comb_is_the_source() -> None:
    """HC-4: four streams that can be told apart, a comb that is not symmetric."""
    one = example("MhcAllReduceResidualOnly", torch.float32, rows=3)
    partial, streams, post, _ = one.tensors
    comb = torch.zeros(3, 4, 4)
    comb[:, 1, 3] = 1.0  # from stream 1 to stream 3
    mixed = MHC_ALL_REDUCE_RESIDUAL_ONLY(torch.zeros_like(partial), streams, post, comb, tp_size=1)
    assert torch.equal(mixed[:, 3], streams[:, 1])
    assert not mixed[:, :3].any()
    real = torch.tensor(ops.sinkhorn(np.random.default_rng(0).normal(size=(3, 4, 4)) * 2, 1e-6, 20)).float()
    right = MHC_ALL_REDUCE_RESIDUAL_ONLY(partial, streams, post, real, tp_size=1)
    transposed = MHC_ALL_REDUCE_RESIDUAL_ONLY(partial, streams, post, real.transpose(1, 2), tp_size=1)
    assert (right - transposed).std() / right.std() > 0.05


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8])
def test_other_stream_counts_are_refused(streams: int) -> None:
    """HC-5: the kernels and the released models know four."""
    rows, hidden = 2, 16
    values = torch.randn(rows, streams, hidden)
    with pytest.raises(OpError, match=rf"streams has shape \[2, {streams}, 16\], expected .*4"):
        HC_COLLAPSE(values, torch.rand(rows, streams))
    with pytest.raises(OpError, match="streams has shape"):
        MHC_COEFFICIENTS(values, torch.randn(24, 4 * hidden), torch.ones(3), torch.zeros(24), **EPS)
    with pytest.raises(OpError, match="streams has shape"):
        MHC_ALL_REDUCE_RESIDUAL_ONLY(
            torch.randn(rows, hidden), values, torch.rand(rows, streams), torch.rand(rows, streams, streams), tp_size=1
        )


@pytest.mark.parametrize("hidden", [32, 100])
def test_every_lane_reaches_the_sums(hidden: int) -> None:
    """HC-5: one hot channel at a time, in the projection, the statistic and the collapse."""
    lanes = torch.eye(4 * hidden).unflatten(1, (4, hidden))
    fn = torch.zeros(24, 4 * hidden)
    fn[0] = torch.arange(1, 4 * hidden + 1) / (4 * hidden)
    pre, _, _ = MHC_COEFFICIENTS(lanes, fn, torch.ones(3), torch.zeros(24), **EPS)
    # A single one among 4H values: mean square 1 / 4H.
    wanted = ops.sigmoid(fn[0].double().numpy() / np.sqrt(1 / (4 * hidden) + 1e-6)) + 1e-6
    assert np.abs(pre[:, 0].double().numpy() - wanted).max() < 1e-6
    weights = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).expand(4 * hidden, 4)
    collapsed = HC_COLLAPSE(lanes, weights)
    assert torch.equal(collapsed.sum(1), torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat_interleave(hidden))


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_v4_has_a_learned_head(tiny: Callable[..., TinyCheckpoint], variant: str) -> None:
    """HC-6: nothing is invented for V4.1, whose released tensors have none."""
    checkpoint, module = tiny(variant), nn.Module()
    register_hc_head(module, checkpoint.draft_config)
    names = {name for name, _ in module.named_parameters()}
    assert (checkpoint.draft_config.variant is Variant.V4) == (variant == "v4")
    assert names == ({"hc_head_fn", "hc_head_base", "hc_head_scale"} if variant == "v4" else set())
    for model in (checkpoint.draft(), checkpoint.target()):
        assert any("hc_head" in name for name in model.state_dict()) == (variant == "v4")


@pytest.mark.parametrize("size", [0.02, 1.0, 40.0])
def test_statistic_is_the_mean_over_all_streams(size: float) -> None:
    """HC-8: streams of real size and of four different sizes; dividing by H halves the mixes and fails."""
    one = example("MhcCoefficients v4", torch.bfloat16, rows=20)
    streams = (one.tensors[0] * size * torch.tensor([0.3, 1.0, 3.0, 10.0])[:, None]).bfloat16()
    one = one.replaced(0, streams)
    s, fn, scale, base = (t.double().numpy() for t in one.tensors)
    wanted = ops.coefficients(s, fn, scale, base, rms_eps=1e-6, hc_eps=1e-6, iterations=20)
    wrong = ops.coefficients(s, fn, scale / 2, base, rms_eps=1e-6, hc_eps=1e-6, iterations=20)
    for found, right, halved in zip(one.run(), wanted, wrong, strict=True):
        assert np.abs(found.double().numpy() - right).max() < 4e-6
        assert np.abs(found.double().numpy() - halved).max() > 1e-2


@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_rms_eps_is_the_variants(eps: float) -> None:
    """Streams of 1e-6: V4's eps dominates their mean square, V4.1's does not exist beside it."""
    one = example("MhcCoefficients v4", torch.float32, rows=10)
    streams = one.tensors[0] * 1e-6
    found = MHC_COEFFICIENTS(streams, *one.tensors[1:], **{**EPS, "rms_eps": eps})
    s, fn, scale, base = (t.double().numpy() for t in (streams, *one.tensors[1:]))
    wanted = ops.coefficients(s, fn, scale, base, rms_eps=eps, hc_eps=1e-6, iterations=20)
    assert np.abs(found[0].double().numpy() - wanted[0]).max() < 4e-6


# The first sublayer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [0.02, 40.0])
def test_equal_streams_need_one_stream(activation: torch.dtype, size: float) -> None:
    """The shortcut equals the general path on four copies within the bounds of spec 8.2 (pre, post and comb in
    float32: 1e-5 + 1e-4 |x|), though fn's parts cancel; the other three streams are not read."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden = 20, 160
    streams = (size * torch.randn(rows, 1, hidden, generator=generator)).to(activation).expand(-1, 4, -1).contiguous()
    fn = torch.randn(24, 4 * hidden, generator=generator) * hidden**-0.5
    fn[:, :hidden] -= fn[:, hidden : 2 * hidden]
    rest = (torch.tensor([0.5, 1.0, 2.0]), torch.randn(24, generator=generator))
    general = MHC_COEFFICIENTS(streams, fn, *rest, **EPS)
    summed = sum_over_streams(fn)
    assert summed.shape == (24, hidden)
    short = MHC_COEFFICIENTS(streams, summed, *rest, **EPS)
    poisoned = streams.clone()
    poisoned[:, 1:] = torch.nan
    again = MHC_COEFFICIENTS(poisoned, summed, *rest, **EPS)
    mean = MHC_COEFFICIENTS(streams, summed / 4, *rest, **EPS)
    for found, wanted, repeated, wrong in zip(short, general, again, mean, strict=True):
        assert ((found - wanted).abs() <= 1e-5 + 1e-4 * wanted.abs()).all()
        assert torch.equal(found, repeated)
        assert (wrong - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("columns", [31, 33, 64, 96, 127, 129])
def test_fn_of_neither_four_streams_nor_one_is_refused(columns: int) -> None:
    with pytest.raises(OpError, match=f"fn has {columns} columns, expected 128, or 32 where the four streams are eq"):
        MHC_COEFFICIENTS(torch.ones(2, 4, 32), torch.zeros(24, columns), torch.ones(3), torch.zeros(24), **EPS)


@pytest.mark.parametrize("network", ["draft", "target"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_networks_take_the_shortcut_where_streams_are_equal(
    tiny: Callable[..., TinyCheckpoint], variant: str, network: str
) -> None:
    """The attention of the first layer, and nothing else; weights changed in training are summed again."""
    model = getattr(tiny(variant), network)()
    layers = list(model.mtp if network == "draft" else model.layers)
    names = set(model.state_dict())
    hidden = model.config.hidden_size
    widths = [(layer.sublayer("attn").fn.shape[1], layer.sublayer("ffn").fn.shape[1]) for layer in layers]
    assert widths == [(hidden, 4 * hidden)] + [(4 * hidden, 4 * hidden)] * (len(layers) - 1)
    assert not any("sum" in name for name in names)
    first = layers[0]
    model.train()
    assert first.sublayer("attn").fn is first.hc_attn_fn
    with torch.no_grad():
        first.hc_attn_fn[:, 3] += 1
    model.eval()
    assert torch.equal(first.sublayer("attn").fn, sum_over_streams(first.hc_attn_fn))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shortcut_changes_no_released_rounding(tiny: Callable[..., TinyCheckpoint], variant: str) -> None:
    """The target with and without it, in released numerics: the streams that leave the first boundary."""
    seen: dict[str, list[Tensor]] = {}
    model = tiny(variant).target(None, probe=lambda name, tensor: seen.setdefault(name, []).append(tensor))
    rows = torch.arange(6, dtype=torch.int32)
    inputs = (rows * 7 % 50, rows, torch.zeros_like(rows))
    with torch.no_grad():
        model(*inputs, target_rings(model, 1))
        model.train()
        model(*inputs, target_rings(model, 1))
    for part in ("pre", "post", "comb"):
        short, general = seen[f"layer0_attn_{part}"]
        assert short.dtype == general.dtype == torch.float32
        assert ((short - general).abs() <= 1e-6 + 1e-6 * general.abs()).all()
    short, general = seen["layer0_ffn_in"]
    assert (short == general).double().mean() > 0.999


# Sum over ranks -----------------------------------------------------------------------------------------


def in_rank_order(partials: Tensor) -> np.ndarray:
    """float32 sum, rank after rank, in numpy."""
    total = partials[0].float().numpy()
    for partial in partials[1:]:
        total = (total + partial.float().numpy()).astype(np.float32)
    return total


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_ranks_are_summed_in_order_and_rounded_once(tp_size: int, activation: torch.dtype) -> None:
    """Bit-equal to the sum in rank order, on every rank; another order or a rounding in between is not."""
    rows, hidden = 40, 64
    generator = torch.Generator().manual_seed(tp_size)
    partials = torch.randn(tp_size, rows, hidden, generator=generator)
    # Large and small values, and a last rank that cancels the first: the order of a float32 sum shows.
    partials *= torch.where(torch.rand(partials.shape, generator=generator) < 0.5, 2.0**11, 2.0**-12)
    partials[-1, ::3] = -partials[0, ::3]
    partials = partials.to(activation)
    mailbox = torch.zeros(tp_size, 2, dtype=torch.int32)
    streams, comb = torch.zeros(rows, 4, hidden, dtype=activation), torch.zeros(rows, 4, 4)
    # post = 1 and empty streams: every stream becomes the sum itself.
    post, pre, weight = torch.ones(rows, 4), torch.full((rows, 4), 0.25), torch.ones(hidden, dtype=activation)
    wanted = torch.from_numpy(in_rank_order(partials)).to(activation)
    for rank in range(tp_size):
        with collective_scope(lambda mine, rank=rank: partials if torch.equal(mine, partials[rank]) else mine):
            mixed = MHC_ALL_REDUCE_RESIDUAL_ONLY(partials[rank], streams, post, comb, mailbox, tp_size=tp_size)
            out = MHC_ALL_REDUCE(
                partials[rank], streams, post, comb, pre, weight, mailbox, tp_size=tp_size, norm_eps=1e-6, **UNQUANTIZED
            )
        assert torch.equal(mixed, out[0])
        for stream in range(4):
            assert torch.equal(mixed[:, stream], wanted)
        assert torch.equal(out[1], wanted)
    if tp_size > 2:
        backwards = torch.from_numpy(in_rank_order(partials.flip(0))).to(activation)
        assert not torch.equal(backwards, wanted)
    if activation is not torch.float32:
        stepwise = partials[0]
        for partial in partials[1:]:
            stepwise = (stepwise.float() + partial.float()).to(activation)
        assert tp_size == 2 or not torch.equal(stepwise, wanted)


def test_scope_of_another_size_is_refused() -> None:
    one = example("MhcAllReduceResidualOnly", torch.float32)
    mailbox = torch.zeros(2, 2, dtype=torch.int32)
    with (
        collective_scope(lambda t: torch.stack([t] * 4)),
        pytest.raises(RuntimeError, match="gathered 4 ranks, the network has 2"),
    ):
        MHC_ALL_REDUCE_RESIDUAL_ONLY(*one.tensors, mailbox, tp_size=2)


def test_sharded_boundary_outside_a_scope_says_what_to_do() -> None:
    one = example("MhcAllReduce v4.1", torch.float32)
    mailbox = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"sharded over 2 ranks ran outside collective_scope\(\); run it through"):
        MHC_ALL_REDUCE(*one.tensors, mailbox, tp_size=2, norm_eps=1e-6, **UNQUANTIZED)


def test_scope_ends_with_its_block() -> None:
    """A scope that raised does not serve the next call."""
    one = example("MhcAllReduceResidualOnly", torch.float32)
    mailbox = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(KeyError), collective_scope(lambda t: torch.stack([t, t])):
        raise KeyError
    with pytest.raises(RuntimeError, match="outside collective_scope"):
        MHC_ALL_REDUCE_RESIDUAL_ONLY(*one.tensors, mailbox, tp_size=2)


def test_one_rank_needs_neither_scope_nor_mailbox() -> None:
    one = example("MhcAllReduceResidualOnly", torch.float32)
    with pytest.raises(OpError, match="takes 4 inputs"):
        MHC_ALL_REDUCE_RESIDUAL_ONLY(*one.tensors, torch.zeros(1, 2, dtype=torch.int32), tp_size=1)
    with pytest.raises(OpError, match=r"takes 5 inputs .*mailbox"):
        MHC_ALL_REDUCE_RESIDUAL_ONLY(*one.tensors, tp_size=2)
