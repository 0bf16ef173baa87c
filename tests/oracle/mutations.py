"""Faults that others shipped, as changes of the package for the time of one pass.

A mutation gets a monkeypatch and the model that is about to run. The tables at the end say in which stage
each fault is: the first that may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dspark_trt.builder.config import Variant
from dspark_trt.builder.model import attention as model_attention
from dspark_trt.builder.model import draft as model_draft
from dspark_trt.builder.model import moe as model_moe
from dspark_trt.builder.model.attention import LatentAttention
from dspark_trt.builder.model.draft import ConfidenceHead
from dspark_trt.builder.model.hyper_connections import StreamChain
from dspark_trt.builder.model.layers import RmsNorm
from dspark_trt.plugins import attention as op_attention
from dspark_trt.plugins import draft_attention, mhc_coefficients, numerics, quantized_linear, routed_experts
from dspark_trt.plugins.hc_collapse import HC_COLLAPSE
from dspark_trt.plugins.markov_sampling import MarkovSampling
from dspark_trt.plugins.mhc_all_reduce import MhcAllReduce, MhcAllReduceResidualOnly
from dspark_trt.plugins.mhc_coefficients import MhcCoefficients
from torch import Tensor, nn

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch, Any], None]


def change_reference(patch: Patch, op: type, change: Callable[..., Any]) -> None:
    """Replace an operation's reference by ``change(reference, attributes, tensors)``."""
    original = op.reference  # type: ignore[attr-defined]

    def reference(self: Any, attributes: Any, *tensors: Tensor) -> Any:
        return change(lambda a, t: original(self, a, *t), attributes, tensors)

    patch.setattr(op, "reference", reference)


# Hyper-connections --------------------------------------------------------------------------------------


def comb_transposed(patch: Patch, _: nn.Module) -> None:
    """HC-4."""
    for op in (MhcAllReduce, MhcAllReduceResidualOnly):
        change_reference(patch, op, lambda run, a, t: run(a, (*t[:3], t[3].transpose(1, 2), *t[4:])))


def post_factor_dropped(patch: Patch, _: nn.Module) -> None:
    def change(run: Any, a: Any, t: Any) -> Any:
        pre, post, comb = run(a, t)
        return pre, post / 2, comb

    change_reference(patch, MhcCoefficients, change)


def hc_eps_dropped(patch: Patch, _: nn.Module) -> None:
    """HC-1."""
    change_reference(patch, MhcCoefficients, lambda run, a, t: run(dataclasses.replace(a, hc_eps=0.0), t))


def rms_eps_dropped(patch: Patch, _: nn.Module) -> None:
    change_reference(patch, MhcCoefficients, lambda run, a, t: run(dataclasses.replace(a, rms_eps=0.0), t))


def _sinkhorn(patch: Patch, step: Callable[[Tensor, int, float], Tensor], last: int) -> None:
    """Another Sinkhorn: ``step(k, axis, eps)``, ending on ``last`` (-2 columns, -1 rows)."""

    def change(run: Any, a: Any, t: Any) -> Any:
        pre, post, _ = run(a, t)
        streams, fn, scale, base = t
        m = mhc_coefficients.project_streams(streams, fn, a.rms_eps)[:, 8:]
        k = torch.softmax((m * scale[2] + base[8:]).unflatten(-1, (4, 4)), -1) + a.hc_eps
        for i in range(2 * a.sinkhorn_iters - 1):
            k = step(k, last if i % 2 == 0 else -3 - last, a.hc_eps)
        return pre, post, k

    change_reference(patch, MhcCoefficients, change)


def sinkhorn_eps_after_the_division(patch: Patch, _: nn.Module) -> None:
    """HC-1: x / sum + eps in place of x / (sum + eps)."""
    _sinkhorn(patch, lambda k, axis, eps: k / k.sum(axis, keepdim=True) + eps, -2)


def sinkhorn_ends_on_rows(patch: Patch, _: nn.Module) -> None:
    _sinkhorn(patch, lambda k, axis, eps: k / (k.sum(axis, keepdim=True) + eps), -1)


def rms_over_one_stream(patch: Patch, _: nn.Module) -> None:
    """HC-8: the squares of 4H values divided by H."""
    original = mhc_coefficients.project_streams

    def project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
        flat = streams.float().flatten(1)
        right = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        return original(streams, fn, eps) / right * torch.rsqrt(4 * flat.square().mean(-1, keepdim=True) + eps)

    patch.setattr(mhc_coefficients, "project_streams", project)


def other_variants_pre(patch: Patch, model: Any) -> None:
    """HC-6: V4.1 collapses with its own pre, V4 with the previous one."""

    def cross(self: StreamChain, state: Any, partial: Tensor, sublayer: Any) -> Any:
        after = self._coefficients(self._mix(state, partial), sublayer)
        pre = after.pre if model.config.variant is Variant.V4_1 else state.pre
        return after, self._normalise(HC_COLLAPSE(after.values, pre), sublayer)

    patch.setattr(StreamChain, "cross", cross)


def head_collapse_is_a_mean(patch: Patch, _: nn.Module) -> None:
    """HC-6: neither V4's learned collapse nor V4.1's last pre."""
    patch.setattr(model_draft, "collapse_head", lambda _, state, __: state.values.mean(1))


def norm_eps_dropped(_: Patch, model: Any) -> None:
    for module in model.modules():
        if isinstance(module, RmsNorm):
            module.eps = 0.0


# Attention ----------------------------------------------------------------------------------------------


def _attention(patch: Patch, change: Callable[..., Tensor]) -> None:
    original = draft_attention.sink_attention
    patch.setattr(draft_attention, "sink_attention", lambda q, k, valid, sink: change(original, q, k, valid, sink))


def positions_one_early(_: Patch, model: Any) -> None:
    """POS-1."""
    forward = model.forward
    model.forward = lambda anchors, positions, *rest: forward(anchors, positions - 1, *rest)


def sink_scaled(patch: Patch, _: nn.Module) -> None:
    _attention(patch, lambda run, q, k, valid, sink: run(q, k, valid, sink * q.shape[-1] ** -0.5))


def block_is_causal(patch: Patch, _: nn.Module) -> None:
    """KV-8."""

    def change(run: Any, q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
        valid = valid.clone()
        valid[:, -5:] &= torch.ones(5, 5, dtype=torch.bool).tril().repeat(len(q) // 5, 1)
        return run(q, keys, valid, sink)

    _attention(patch, change)


def oldest_context_row_hidden(patch: Patch, _: nn.Module) -> None:
    def change(run: Any, q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
        valid = valid.clone()
        valid[:, 0] = False
        return run(q, keys, valid, sink)

    _attention(patch, change)


def output_not_rotated_back(patch: Patch, _: nn.Module) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        return x if inverse else numerics.apply_rope(x, cos, sin)

    patch.setattr(draft_attention, "apply_rope", rope)


def rotary_by_halves(patch: Patch, _: nn.Module) -> None:
    """POS-7: channel i turned with channel i + half in place of its neighbour."""

    def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        half = cos.shape[-1]
        a, b = x[..., -2 * half : -half], x[..., -half:]
        sin = -sin if inverse else sin
        return torch.cat((x[..., : -2 * half], a * cos - b * sin, a * sin + b * cos), -1)

    for module in (op_attention, draft_attention):
        patch.setattr(module, "apply_rope", rope)


def other_variants_query_norm(patch: Patch, model: Any) -> None:
    """Only V4 normalises each query head."""

    def query(self: LatentAttention, x: Tensor) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.heads, self.config.head_dim))
        return numerics.rms_norm(q, None, self.config.rms_norm_eps) if self.config.variant is Variant.V4_1 else q

    patch.setattr(LatentAttention, "query", query)


def heads_grouped_by_stride(patch: Patch, _: nn.Module) -> None:
    original = LatentAttention.output

    def output(self: LatentAttention, attended: Tensor) -> Tensor:
        return original(self, attended.unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(1, 2))

    patch.setattr(LatentAttention, "output", output)


# Experts, heads, inputs ---------------------------------------------------------------------------------


def routed_scaling_skipped(_: Patch, model: Any) -> None:
    for stage in model.mtp:
        stage.ffn.gate.scaling = 1.0


def routing_weights_with_bias(patch: Patch, _: nn.Module) -> None:
    """The bias chooses, it does not weigh."""
    original = model_moe.Gate.forward

    def forward(self: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        indices, _ = original(self, x, ids)
        scores = torch.nn.functional.softplus(numerics.matmul(x, self.weight)).sqrt() + self.bias
        weights = scores.gather(-1, indices.long())
        return indices, weights / weights.sum(-1, keepdim=True) * self.scaling

    patch.setattr(model_moe.Gate, "forward", forward)


def shared_expert_not_clamped(_: Patch, model: Any) -> None:
    for stage in model.mtp:
        stage.ffn.shared_experts.limit = 1e9


def shared_expert_dropped(_: Patch, model: Any) -> None:
    """CK-1."""
    model.mtp[1].ffn.shared_experts.w2.weight.zero_()


def noise_token_zero(_: Patch, model: Any) -> None:
    """POS-5."""
    model.config = dataclasses.replace(model.config, noise_token_id=0)


def features_in_another_order(_: Patch, model: Any) -> None:
    forward = model.forward
    width = model.config.hidden_size

    def changed(anchors: Tensor, positions: Tensor, slots: Tensor, features: Tensor, *rest: Any) -> Any:
        return forward(anchors, positions, slots, features.roll(width, -1), *rest)

    model.forward = changed


def markov_bias_from_the_anchor_alone(patch: Patch, _: nn.Module) -> None:
    """POS-2: every slot's bias from the anchor."""

    def change(run: Any, a: Any, t: Any) -> Any:
        base, anchors, embed, head = t
        feature = embed[anchors.long()].unsqueeze(1).expand(-1, base.shape[1], -1)
        logits = base + feature @ head.T
        return logits.argmax(-1).int(), feature, logits

    change_reference(patch, MarkovSampling, change)


def markov_tables_swapped(patch: Patch, _: nn.Module) -> None:
    change_reference(patch, MarkovSampling, lambda run, a, t: run(a, (t[0], t[1], t[3], t[2])))


def confidence_of_the_next_slot(patch: Patch, _: nn.Module) -> None:
    """SMP-11: the feature of the token that a slot produces, not of the one it starts from."""
    original = ConfidenceHead.forward
    patch.setattr(ConfidenceHead, "forward", lambda self, hidden, f: original(self, hidden, f.roll(-1, 1)))


def confidence_of_the_normed_hidden(patch: Patch, model: Any) -> None:
    """SMP-11: the head reads the hidden before the final norm."""
    original = ConfidenceHead.forward
    norm = model.mtp[-1].norm
    patch.setattr(ConfidenceHead, "forward", lambda self, hidden, f: original(self, norm(hidden), f))


# Released rounding points -------------------------------------------------------------------------------


def cache_not_quantised(_: Patch, model: Any) -> None:
    """Spec 10.3: the layout of an outdated public copy."""
    for stage in model.mtp:
        stage.attn.cache_attributes["quant_width"] = 0


def cache_layout_of_the_other_variant(_: Patch, model: Any) -> None:
    config = model.config
    v4 = config.variant is Variant.V4
    width = config.head_dim if v4 else config.head_dim - config.qk_rope_head_dim
    for stage in model.mtp:
        stage.attn.cache_attributes |= {"quant_width": width, "quant_group": 32 if v4 else 16}


def output_input_quantised(patch: Patch, _: nn.Module) -> None:
    """Spec 10.5: wo_a's input is not rounded to FP8."""
    original = model_attention.linear
    patch.setattr(model_attention, "linear", lambda x, w: original(numerics.act_quant_dequant(x.contiguous(), 32), w))


def scales_rounded_down(patch: Patch, _: nn.Module) -> None:
    original = numerics.pow2_ceil
    patch.setattr(numerics, "pow2_ceil", lambda t: original(t) / 2)


def inner_activation_not_rounded(patch: Patch, _: nn.Module) -> None:
    """The routing weight is applied after w2, where the rounding of a = silu(g) u w is another."""

    def change(run: Any, a: Any, t: Any) -> Any:
        x, indices, weights, *experts = t
        single = [run(a, (x, indices[:, i : i + 1], torch.ones_like(weights[:, :1]), *experts)) for i in range(2)]
        return sum(y * weights[:, i : i + 1] for i, y in enumerate(single))

    change_reference(patch, routed_experts.RoutedExperts, change)


def dense_weights_decoded_twice_as_large(patch: Patch, _: nn.Module) -> None:
    """CK-5: an exponent bias of 126. Norms follow main_proj, wq_a and wkv and hide a common factor there."""
    original = quantized_linear.decode_e8m0
    patch.setattr(quantized_linear, "decode_e8m0", lambda s: 2 * original(s))


# Target -------------------------------------------------------------------------------------------------


def capture_one_late(_: Patch, model: Any) -> None:
    """POS-6: V4.1 captured as V4 is, or V4 one layer further on."""
    ids = tuple(max(i - 1, 0) for i in model.config.feature_layer_ids)
    model.config = dataclasses.replace(model.config, feature_layer_ids=ids)


def window_one_wider(_: Patch, model: Any) -> None:
    for layer in model.layers:
        layer.attn.config = dataclasses.replace(layer.attn.config, sliding_window=33)


def hash_layers_routed_by_score(_: Patch, model: Any) -> None:
    gate = model.layers[0].ffn.gate
    if hasattr(gate, "tid2eid"):
        del gate.tid2eid
        gate.bias = nn.Parameter(torch.zeros(len(gate.weight)))
    else:
        gate.tid2eid = nn.Parameter(torch.zeros(320, 2, dtype=torch.int32), requires_grad=False)


# Tables ------------------------------------------------------------------------------------------------

DRAFT_MUTATIONS: dict[Mutation, str] = {
    comb_transposed: "stage0_mid_streams",
    post_factor_dropped: "stage0_attn_post",
    hc_eps_dropped: "stage0_attn_pre",
    rms_eps_dropped: "stage0_attn_pre",
    sinkhorn_eps_after_the_division: "stage0_attn_comb",
    sinkhorn_ends_on_rows: "stage0_attn_comb",
    rms_over_one_stream: "stage0_attn_pre",
    other_variants_pre: "stage0_ffn_in",
    head_collapse_is_a_mean: "hidden_prenorm",
    norm_eps_dropped: "main_x",
    positions_one_early: "stage0_attn_out",
    sink_scaled: "stage0_attn_out",
    block_is_causal: "stage0_attn_out",
    oldest_context_row_hidden: "stage0_attn_out",
    output_not_rotated_back: "stage0_attn_out",
    rotary_by_halves: "stage0_context_kv",
    other_variants_query_norm: "stage0_attn_out",
    heads_grouped_by_stride: "stage0_attn_out",
    routed_scaling_skipped: "stage0_ffn_out",
    routing_weights_with_bias: "stage0_ffn_out",
    shared_expert_not_clamped: "stage0_ffn_out",
    shared_expert_dropped: "stage1_ffn_out",
    noise_token_zero: "stage0_attn_pre",
    features_in_another_order: "main_x",
    markov_bias_from_the_anchor_alone: "corrected_logits",
    markov_tables_swapped: "corrected_logits",
    confidence_of_the_next_slot: "confidence",
    confidence_of_the_normed_hidden: "confidence",
}

RELEASED_MUTATIONS: dict[Mutation, str] = {
    cache_not_quantised: "stage0_context_kv",
    cache_layout_of_the_other_variant: "stage0_context_kv",
    output_input_quantised: "stage0_attn_out",
    scales_rounded_down: "main_x",
    inner_activation_not_rounded: "stage0_ffn_out",
    dense_weights_decoded_twice_as_large: "stage0_attn_out",
}

TARGET_MUTATIONS: dict[Mutation, str] = {
    capture_one_late: "target_features",
    window_one_wider: "layer0_attn_out",
    hash_layers_routed_by_score: "layer0_ffn_out",
    comb_transposed: "layer1_attn_pre",
}
