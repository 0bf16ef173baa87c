"""V4 layers against Hugging Face transformers' DeepSeek-V4, an implementation by other people.

Same weights in both, float32, eager attention and eager experts. What its configuration needs:

* ``layer_types`` all "sliding_attention" (its default compresses every layer), and ``mlp_layer_types`` with
  the hash-routed layers first;
* ``partial_rotary_factor`` = rotated channels / head_dim; sliding layers use the rope called "main" (plain,
  theta 10000), the YaRN one belongs to compressed layers;
* it stacks w1 and w3 of an expert in ``gate_up_proj``, w1 first;
* it knows V4 alone (own pre, learned head), and neither draft, features nor quantised activations. Routing
  weights multiply after w2, not before: the same number without rounding.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt.builder.model.target import TargetModel
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS
from torch import Tensor

from tests.configs import TinyCheckpoint, target_rings
from tests.oracle.comparison import numpy_target

transformers = pytest.importorskip("transformers", minversion="5.24")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

Tiny = Callable[..., TinyCheckpoint]
LOGITS = 1e-4
"""Absolute, of logits with a standard deviation of one: float32 sums in another order, eight sublayers deep,
differ by 1e-5 here; the wrong window, comb axis, RoPE direction or sink scale by more than 1e-2."""
LENGTH = 80  # two and a half windows


@pytest.fixture(scope="module")
def checkpoint(tiny: Tiny) -> TinyCheckpoint:
    return tiny("v4", num_hash_layers=2)


def config_of(keys: dict[str, Any]) -> Any:
    layers = keys["num_hidden_layers"]
    same = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("q_lora_rank", "o_groups", "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
        *("num_experts_per_tok", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "swiglu_limit"),
        *("sliding_window", "rms_norm_eps", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rope_theta"),
        "max_position_embeddings",
    )
    config = transformers.DeepseekV4Config(
        **{name: keys[name] for name in same},
        layer_types=["sliding_attention"] * layers,
        mlp_layer_types=["hash_moe" if i < keys["num_hash_layers"] else "moe" for i in range(layers)],
        partial_rotary_factor=keys["qk_rope_head_dim"] / keys["head_dim"],
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    config._experts_implementation = "eager"
    return config


def their_name(name: str) -> str:
    """Released tensor name -> name in their state dict; stacked experts are handled apart."""
    for ours, theirs in (
        ("embed.", "model.embed_tokens."),
        ("head.", "lm_head."),
        ("norm.", "model.norm."),
        ("hc_head_", "model.hc_head.hc_"),
        ("layers.", "model.layers."),
    ):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    for ours, theirs in (
        (".attn.attn_sink", ".self_attn.sinks"),
        (".attn.wq_a.", ".self_attn.q_a_proj."),
        (".attn.q_norm.", ".self_attn.q_a_norm."),
        (".attn.wq_b.", ".self_attn.q_b_proj."),
        (".attn.wkv.", ".self_attn.kv_proj."),
        (".attn.kv_norm.", ".self_attn.kv_norm."),
        (".attn.wo_a.", ".self_attn.o_a_proj."),
        (".attn.wo_b.", ".self_attn.o_b_proj."),
        (".attn_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"),
        (".ffn.shared_experts.w1.", ".mlp.shared_experts.gate_proj."),
        (".ffn.shared_experts.w2.", ".mlp.shared_experts.down_proj."),
        (".ffn.shared_experts.w3.", ".mlp.shared_experts.up_proj."),
        (".ffn.", ".mlp."),
        (".hc_attn_", ".attn_hc."),
        (".hc_ffn_", ".ffn_hc."),
    ):
        name = name.replace(ours, theirs)
    return name


def their_state(checkpoint: TinyCheckpoint) -> dict[str, Tensor]:
    """The checkpoint, dequantised by the oracle, under their names."""
    oracle, state = numpy_target(checkpoint), {}
    names = [n for n in checkpoint.tensors if not n.startswith("mtp.") and not n.endswith(".scale")]
    for name in names:
        if ".experts." not in name:
            value = torch.from_numpy(np.array(oracle.get(name)))
            state[their_name(name)] = value if value.dtype == torch.int64 else value.float()
    for layer in range(checkpoint.keys["num_hidden_layers"]):
        prefix, experts = f"layers.{layer}.ffn.experts", range(checkpoint.keys["n_routed_experts"])
        w1, w2, w3 = (np.stack([oracle.get(f"{prefix}.{e}.{w}.weight") for e in experts]) for w in ("w1", "w2", "w3"))
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.from_numpy(np.concatenate((w1, w3), 1)).float()
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.from_numpy(w2).float()
    return state


@pytest.fixture(scope="module")
def theirs(checkpoint: TinyCheckpoint) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = transformers.DeepseekV4ForCausalLM(config_of(checkpoint.keys)).eval()
    model.load_state_dict(their_state(checkpoint), strict=True)
    return model


@pytest.fixture(scope="module")
def ours(checkpoint: TinyCheckpoint) -> TargetModel:
    return checkpoint.target(torch.float32)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 319, (LENGTH,), dtype=torch.int32, generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def their_logits(theirs: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return theirs(input_ids=tokens[None].long(), use_cache=False).logits[0]


def run(model: TargetModel, tokens: Tensor, chunks: list[int], ring_rows: int) -> Tensor:
    """Our logits of ``tokens``, fed in ``chunks``."""
    rings, logits, start = target_rings(model, 1, rows=ring_rows), [], 0
    for size in chunks:
        rows = torch.arange(start, start + size, dtype=torch.int32)
        with torch.no_grad():
            part, _, rings = model(tokens[start : start + size], rows, torch.zeros_like(rows), rings)
        logits.append(part)
        start += size
    assert start == len(tokens)
    return torch.cat(logits)


CHUNKS = {
    "one prefill": [LENGTH],
    "chunks of a window": [32, 32, 16],
    "prefill then decode": [33, *[1] * (LENGTH - 33)],
    "prefill then blocks of six": [20, *[6] * 10],
    "odd chunks": [1, 31, 2, 7, 29, 10],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_equal_theirs(ours: TargetModel, their_logits: Tensor, tokens: Tensor, chunks: list[int]) -> None:
    """Whole forward, hash-routed layers first, positions beyond the window; chunked and one-shot."""
    assert their_logits.std() > 0.5, "logits too small for the tolerance to mean anything"
    # One call may carry Wr - W rows.
    found = run(ours, tokens, chunks, ring_rows=32 + max(chunks))
    assert (found - their_logits).abs().max() < LOGITS
    assert torch.equal(found.argmax(-1), their_logits.argmax(-1))


def test_logits_equal_their_own_cached_decode(theirs: Any, ours: TargetModel, tokens: Tensor) -> None:
    """Their prefill of 50 rows and decode of the rest, through their sliding cache, against our decode."""
    logits, cache = [], None
    with torch.no_grad():
        for part in (tokens[:50], *tokens[50:].split(1)):
            out = theirs(input_ids=part[None].long(), cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits[0])
    found = run(ours, tokens, [50, *[1] * 30], ring_rows=82)
    assert (found - torch.cat(logits)).abs().max() < LOGITS


@pytest.mark.parametrize("fault", ["window", "sink", "hash", "post", "bias"])
def test_comparison_sees_a_fault(checkpoint: TinyCheckpoint, their_logits: Tensor, tokens: Tensor, fault: str) -> None:
    """The comparison above turns red when a weight or a constant of one layer is changed."""
    model = checkpoint.target(torch.float32)
    layer = model.layers[2]
    if fault == "window":
        for each in model.layers:
            each.attn.config = dataclasses.replace(each.attn.config, sliding_window=31)
    elif fault == "sink":
        layer.attn.attn_sink.mul_(checkpoint.keys["head_dim"] ** -0.5)
    elif fault == "hash":
        model.layers[0].ffn.gate.tid2eid.copy_(model.layers[0].ffn.gate.tid2eid.roll(1, 0))
    elif fault == "post":
        layer.hc_ffn_base[4:8] -= 0.7
    else:
        layer.ffn.gate.bias.zero_()
    found = run(model, tokens, [LENGTH], ring_rows=112)
    assert (found - their_logits).abs().max() > 10 * LOGITS


@pytest.mark.parametrize("kind", ["attn", "ffn"])
def test_coefficients_equal_theirs(theirs: Any, checkpoint: TinyCheckpoint, kind: str) -> None:
    """pre, post and comb of distinct streams; their module returns post, comb and the collapsed streams."""
    module = getattr(theirs.model.layers[1], f"{kind}_hc")
    streams = (
        torch.randn(50, 4, 256, generator=torch.Generator().manual_seed(1))
        * torch.tensor([0.1, 1.0, 3.0, 30.0])[:, None]
    )
    keys = checkpoint.keys
    pre, post, comb = MHC_COEFFICIENTS(
        streams,
        module.fn.detach(),
        module.scale.detach(),
        module.base.detach(),
        rms_eps=keys["rms_norm_eps"],
        hc_eps=keys["hc_eps"],
        sinkhorn_iters=keys["hc_sinkhorn_iters"],
    )
    with torch.no_grad():
        their_post, their_comb, collapsed = module(streams[None])
    # Values of order one after two dozen float32 operations.
    assert (post - their_post[0]).abs().max() < 5e-6
    assert (comb - their_comb[0]).abs().max() < 5e-6
    # The collapse shows pre, of streams up to 100.
    assert ((pre.unsqueeze(-1) * streams).sum(1) - collapsed[0]).abs().max() < 2e-4
    assert (their_comb[0] - their_comb[0].transpose(1, 2)).abs().max() > 0.1, "comb is symmetric, its axes can't show"


def test_router_equals_theirs(theirs: Any, ours: TargetModel, tokens: Tensor) -> None:
    """Score routing (layer 3) and hash routing (layer 0): ids and weights."""
    x = torch.randn(LENGTH, 256, generator=torch.Generator().manual_seed(2))
    for layer in (0, 3):
        found_ids, found_weights = ours.layers[layer].ffn.gate(x, tokens)
        gate = theirs.model.layers[layer].mlp.gate
        with torch.no_grad():
            _, weights, indices = gate(x, tokens.long()) if layer == 0 else gate(x)
        order, found_order = indices.argsort(-1), found_ids.long().argsort(-1)
        assert torch.equal(found_ids.long().gather(-1, found_order), indices.gather(-1, order))
        assert torch.allclose(found_weights.gather(-1, found_order), weights.gather(-1, order), rtol=1e-5, atol=0)
