"""Target and draft of both variants in float64 numpy, from the released tensors and ``config.json``.

There are no rings here: a request's context is a dictionary from position to entry, and attention picks the
positions it may see. Every stage tensor is recorded under the name of the network's probe, in the order of
the dataflow. What another implementation computed for a stage can be put in its place (``forced``), so that
each stage is computed from the other side's inputs and differs only if the fault is in that stage.

``released`` rounds activations as the released model does: to bf16 after every operation, through FP8 at the
inputs of quantised layers and in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracle import numpy_ops as ops
from tests.oracle.numpy_ops import Array


class NumpyModel:
    """Weights and layers; one instance records one forward pass at a time."""

    def __init__(
        self, keys: Mapping[str, Any], variant: str, block: int, tensors: Mapping[str, Tensor], *, released: bool
    ):
        self.keys, self.v41, self.block, self.tensors = keys, variant == "v4.1", block, tensors
        self.released, self.rounding = released, ops.BF16 if released else ops.EXACT
        self.trace: dict[str, Array] = {}
        self.forced: Mapping[str, Array] = {}
        self._cache: dict[str, Array] = {}
        self.eps, self.rope_dims = keys["rms_norm_eps"], keys["qk_rope_head_dim"]
        self.theta, self.window = keys["rope_theta"], keys["sliding_window"]

    # Weights ---------------------------------------------------------------------------------------------

    def get(self, name: str) -> Array:
        """Float64 values of a tensor, dequantised when it has scales."""
        if name not in self._cache:
            tensor, scale = self.tensors[name], self.tensors.get(name.removesuffix(".weight") + ".scale")
            if scale is None or name.endswith("_scale"):
                wide = tensor if tensor.dtype == torch.int64 else tensor.double()
                self._cache[name] = wide.numpy()
            else:
                raw, factors = tensor.view(torch.uint8).numpy(), ops.decode_e8m0(scale.view(torch.uint8).numpy())
                if tensor.dtype == torch.int8:
                    self._cache[name] = ops.decode_fp4(raw) * np.repeat(factors, 32, -1)
                else:
                    values = ops.decode_e4m3(raw)
                    self._cache[name] = values * ops.spread_blocks(factors, self.block, values.shape)
        return self._cache[name]

    def linear(self, x: Array, name: str) -> Array:
        """A quantised layer: its input is rounded to FP8 in released arithmetic."""
        if self.released:
            x = ops.act_quant_dequant(x, self.block)
        return self.rounding(x @ self.get(f"{name}.weight").T)

    def norm(self, x: Array, name: str) -> Array:
        return ops.rms_norm(x, self.get(f"{name}.weight"), self.eps, self.rounding)

    def record(self, name: str, value: Array) -> Array:
        """Note what was computed; go on with the other side's value where it is given."""
        self.trace[name] = value
        return self.forced[name].reshape(value.shape) if name in self.forced else value

    # Sublayers -------------------------------------------------------------------------------------------

    def rotate(self, x: Array, positions: Array, *, inverse: bool = False) -> Array:
        return ops.rope(x, positions, self.rope_dims, self.theta, self.rounding, inverse=inverse)

    def entry(self, kv: Array, positions: Array) -> Array:
        """Cache entries of normalised rows: V4 rounds the channels before RoPE in groups of 64, V4.1 all in 32s."""
        out = self.rotate(kv, positions)
        if self.released:
            width = out.shape[-1] if self.v41 else out.shape[-1] - self.rope_dims
            out[..., :width] = ops.act_quant_dequant(out[..., :width], 32 if self.v41 else 64)
        return out

    def key_value(self, x: Array, prefix: str) -> Array:
        return self.norm(self.linear(x, f"{prefix}.attn.wkv"), f"{prefix}.attn.kv_norm")

    def attention(self, x: Array, prefix: str, positions: Array, visible: Callable[[int], Array]) -> Array:
        """x [n, H]; ``visible(row)`` gives the entries that a row sees, [K, D]."""
        keys = self.keys
        heads, dim, groups = keys["num_attention_heads"], keys["head_dim"], keys["o_groups"]
        q = self.linear(
            self.norm(self.linear(x, f"{prefix}.attn.wq_a"), f"{prefix}.attn.q_norm"), f"{prefix}.attn.wq_b"
        )
        q = q.reshape(len(x), heads, dim)
        if not self.v41:
            q = ops.rms_norm(q, 1.0, self.eps, self.rounding)
        q = self.rotate(q, positions)
        sink = self.get(f"{prefix}.attn.attn_sink")
        o = np.stack([ops.sink_attention(q[i], visible(i), sink, self.rounding) for i in range(len(x))])
        o = self.rotate(o, positions, inverse=True)
        wo_a = self.get(f"{prefix}.attn.wo_a.weight").reshape(groups, -1, heads * dim // groups)
        t = np.stack([o.reshape(len(x), groups, -1)[:, g] @ wo_a[g].T for g in range(groups)], 1)
        return self.linear(self.rounding(t).reshape(len(x), -1), f"{prefix}.attn.wo_b")

    def moe(self, x: Array, prefix: str, ids: Array, top_k: int) -> Array:
        keys, gate = self.keys, f"{prefix}.ffn.gate"
        hashed = f"{gate}.tid2eid" in self.tensors
        chosen, weights = ops.route(
            x,
            self.get(f"{gate}.weight"),
            None if hashed else self.get(f"{gate}.bias"),
            top_k,
            keys["routed_scaling_factor"],
            self.get(f"{gate}.tid2eid")[ids] if hashed else None,
        )
        out = self.expert(x, f"{prefix}.ffn.shared_experts", np.ones(len(x)))
        for row in range(len(x)):
            for expert, weight in zip(chosen[row], weights[row], strict=True):
                name = f"{prefix}.ffn.experts.{expert}"
                out[row] += self.expert(x[row : row + 1], name, np.array([weight]))[0]
        return self.rounding(out)

    def expert(self, x: Array, name: str, weight: Array) -> Array:
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        inner = ops.swiglu(gate, up, self.keys["swiglu_limit"]) * weight[:, None]
        return self.linear(self.rounding(inner), f"{name}.w2")

    # Networks --------------------------------------------------------------------------------------------

    def layers(
        self,
        x: Array,
        stages: Sequence[tuple[str, str]],
        attend: Callable[[Array, int], Array],
        feed: Callable[[Array, int], Array],
    ) -> tuple[list[Array], Array]:
        """Run rows x through (prefix, label) layers; returns the streams before each layer and after the
        last, and the last pre (spec 3.4)."""
        keys = self.keys
        streams = np.repeat(x[:, None], 4, 1)
        previous = np.zeros((len(x), 4))
        previous[:, 0] = 1
        between = [streams]
        for index, (prefix, label) in enumerate(stages):
            for kind in ("attn", "ffn"):
                name = f"{label}_{kind}"
                values = ops.coefficients(
                    streams,
                    *(self.get(f"{prefix}.hc_{kind}_{part}") for part in ("fn", "scale", "base")),
                    rms_eps=self.eps,
                    hc_eps=keys["hc_eps"],
                    iterations=keys["hc_sinkhorn_iters"],
                )
                pre, post, comb = (
                    self.record(f"{name}_{part}", v) for part, v in zip(("pre", "post", "comb"), values, strict=True)
                )
                hidden = self.record(f"{name}_in", ops.collapse(streams, previous if self.v41 else pre, self.rounding))
                normed = self.norm(hidden, f"{prefix}.{kind}_norm")
                out = attend(normed, index) if kind == "attn" else feed(normed, index)
                streams = ops.mix(self.record(f"{name}_out", out), streams, post, comb, self.rounding)
                streams = self.record(f"{label}_mid_streams" if kind == "attn" else f"{label}_streams", streams)
                previous = pre
            between.append(streams)
        return between, previous

    def head(self, streams: Array, previous: Array, prefix: str) -> Array:
        """The collapsed rows: the last pre in V4.1, V4's learned head otherwise."""
        pre = previous
        if not self.v41:
            mixes = ops.project_streams(streams, self.get(f"{prefix}hc_head_fn"), self.eps)
            pre = ops.sigmoid(mixes * self.get(f"{prefix}hc_head_scale") + self.get(f"{prefix}hc_head_base"))
            pre = pre + self.keys["hc_eps"]
        return ops.collapse(streams, pre, self.rounding)


class NumpyTarget(NumpyModel):
    def run(self, tokens: Array, *, forced: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """The stages of one sequence that starts at position 0, causal, window included."""
        self.trace, self.forced = {}, forced or {}
        layers = [(f"layers.{i}", f"layer{i}") for i in range(self.keys["num_hidden_layers"])]
        positions = np.arange(len(tokens))

        def attend(x: Array, index: int) -> Array:
            prefix = layers[index][0]
            entries = self.entry(self.key_value(x, prefix), positions)
            return self.attention(x, prefix, positions, lambda row: entries[max(0, row - self.window + 1) : row + 1])

        def feed(x: Array, index: int) -> Array:
            return self.moe(x, layers[index][0], tokens, self.keys["num_experts_per_tok"])

        between, previous = self.layers(self.get("embed.weight")[tokens], layers, attend, feed)
        shift = 0 if self.v41 else 1
        captured = [between[i + shift].mean(1) for i in self.keys["dspark_target_layer_ids"]]
        self.record("target_features", self.rounding(np.concatenate(captured, -1)))
        hidden = self.head(between[-1], previous, "")
        self.record("logits", self.norm(hidden, "norm") @ self.get("head.weight").T)
        return self.trace


class NumpyDraft(NumpyModel):
    """Keeps each slot's context as stage -> position -> entry."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.context: dict[tuple[int, int], dict[int, Array]] = {}
        self.stages = 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("mtp."))

    def run(
        self,
        anchors: Array,
        positions: Array,
        slots: Array,
        features: Array,
        feature_positions: Array,
        feature_slots: Array,
        *,
        forced: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """The stages of one greedy pass."""
        self.trace, self.forced = {}, forced or {}
        keys, skipped = self.keys, int(not self.keys.get("dspark_sample_from_anchor", True))
        block = keys["dspark_block_size"] + skipped
        stages = [(f"mtp.{s}", f"stage{s}") for s in range(self.stages)]
        top_k = keys["dspark_num_experts_per_tok"] if self.v41 else keys["num_experts_per_tok"]

        main_x = self.record("main_x", self.norm(self.linear(features, "mtp.0.main_proj"), "mtp.0.main_norm"))
        for stage, (prefix, label) in enumerate(stages):
            entries = self.entry(self.key_value(main_x, prefix), feature_positions)
            entries = self.record(f"{label}_context_kv", entries)
            for slot, position, entry in zip(feature_slots, feature_positions, entries, strict=True):
                if slot >= 0:
                    self.context.setdefault((stage, int(slot)), {})[int(position)] = entry

        tokens = np.full((len(anchors), block), keys["dspark_noise_token_id"])
        tokens[:, 0] = anchors
        row_positions = (positions[:, None] + np.arange(block)).reshape(-1)

        def attend(x: Array, index: int) -> Array:
            prefix = stages[index][0]
            own = self.entry(self.key_value(x, prefix), row_positions).reshape(len(anchors), block, -1)

            def visible(row: int) -> Array:
                request = row // block
                anchor, context = int(positions[request]), self.context.get((index, int(slots[request])), {})
                seen = range(max(0, anchor - self.window), anchor)
                # Released order: ring slots ascending, then the block.
                seen_in_order = sorted(seen, key=lambda p: p % self.window)
                return np.array([*(context[p] for p in seen_in_order), *own[request]])

            return self.attention(x, prefix, row_positions, visible)

        def feed(x: Array, index: int) -> Array:
            return self.moe(x, stages[index][0], tokens.reshape(-1), top_k)

        embedded = self.get("embed.weight")[tokens.reshape(-1)]
        between, previous = self.layers(embedded, stages, attend, feed)
        last = stages[-1][0]
        hidden = self.head(between[-1], previous, f"{last}.").reshape(len(anchors), block, -1)[:, skipped:]
        hidden = self.record("hidden_prenorm", hidden)
        base = self.record("base_logits", self.norm(hidden, f"{last}.norm") @ self.get("head.weight").T)
        names = ("embed", "head") if self.v41 else ("markov_w1", "markov_w2")
        embed, head = (self.get(f"{last}.markov_head.{name}.weight") for name in names)
        chosen, markov_features, corrected = ops.markov(base, anchors, embed, head, lambda x, _: x.argmax(-1))
        self.record("corrected_logits", corrected)
        self.record("draft_tokens", chosen)
        both = np.concatenate((hidden, markov_features), -1)
        self.record("confidence", (both @ self.get(f"{last}.confidence_head.proj.weight").T)[..., 0])
        return self.trace
