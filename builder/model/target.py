"""The target network: the language model that verifies (spec 3.1, 3.4, section 6).

Rows of several requests go through together; a request's rows are consecutive tokens of its sequence.
Besides logits, the network returns the mean over the streams at the captured layers, which is what the draft sees
of the target: V4 captures a layer's output, V4.1 the streams that enter it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..config import ConfigError, TargetConfig, Variant
from .attention import WindowAttention
from .context import BuildContext
from .hyper_connections import HyperConnectedLayer, StreamChain, Streams, collapse_head, logits, register_hc_head
from .layers import RmsNorm, Table
from .moe import MoE


def attention_kind(config: TargetConfig, layer: int) -> type[WindowAttention]:
    """The attention class of a layer, by its compress ratio.

    Raises:
        ConfigError: for compressed attention, which this version does not build.
    """
    ratio = config.compress_ratios[layer]
    if ratio == 0:
        return WindowAttention
    raise ConfigError(
        f"layer {layer} has compress_ratio {ratio}, expected 0: this version builds sliding-window targets only; "
        "convert the checkpoint's draft alone with dspark-convert --draft-only"
    )


class TargetLayer(HyperConnectedLayer):
    def __init__(self, index: int, config: TargetConfig, context: BuildContext):
        super().__init__(f"layer{index}", config, context, first=index == 0)
        self.attn = attention_kind(config, index)(config, context)
        self.ffn = MoE(config, context, hashed=index < config.num_hash_layers)


class TargetModel(nn.Module):
    """The rank-local target; parameters carry the released names (``layers.{i}.*``, embed, norm, head)."""

    def __init__(self, config: TargetConfig, context: BuildContext):
        super().__init__()
        self.config, self.context = config, context
        self.embed = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.head = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, context.dtype)
        self.layers = nn.ModuleList(TargetLayer(i, config, context) for i in range(config.num_hidden_layers))
        register_hc_head(self, config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv_rings: list[Tensor],
        mailbox: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run T rows.

        Args:
            input_ids, positions, slots: [T] int32; slot -1 is padding.
            kv_rings: one [S, Wr, D] a layer; a call may carry up to Wr - W rows of one request.

        Returns:
            logits [T, V] float32, captured features [T, num_features * H], the updated rings.
        """
        config = self.config
        chain = StreamChain(config, self.context, () if mailbox is None else (mailbox,))
        # Streams between layers: entry i entered layer i, entry i + 1 left it.
        between: list[Tensor] = []
        rings, state = [], None
        partial = x = self.embed.weight[input_ids.long()]
        for layer, ring in zip(cast("list[TargetLayer]", list(self.layers)), kv_rings, strict=True):
            attn, ffn = layer.sublayer("attn"), layer.sublayer("ffn")
            state, x = chain.enter(x, attn) if state is None else chain.cross(state, partial, attn)
            between.append(state.values)
            partial, ring = layer.attn(x, positions, slots, ring)
            rings.append(ring)
            state, x = chain.cross(state, partial, ffn)
            partial = layer.ffn(x, input_ids)
        assert isinstance(state, Streams)
        state = chain.leave(state, partial)
        between.append(state.values)

        shift = 1 if config.variant is Variant.V4 else 0
        features = [between[i + shift].float().mean(1).to(self.context.dtype) for i in config.feature_layer_ids]
        hidden = collapse_head(self, state, config)
        return logits(hidden, self.norm, self.head.weight), torch.cat(features, -1), rings
