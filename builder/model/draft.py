"""The DSpark draft network (spec sections 3.2 to 5.3).

One call advances every request: the captured target rows of its last step become entries of the
stages' rings, and a block of B rows - the anchor and B - 1 noise tokens - is drafted against them.
Draft rows carry no target state themselves; what the target knows arrives through the rings alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ...plugins.markov_sampling import MARKOV_SAMPLING, Sampler
from ...plugins.numerics import matmul
from ..config import DraftConfig
from .attention import DraftBlockAttention
from .context import BuildContext
from .hyper_connections import (
    HyperConnectedLayer,
    StreamChain,
    Streams,
    collapse_head,
    logits,
    register_hc_head,
)
from .layers import Fp8Linear, RmsNorm, Table
from .markov import MarkovHead, MarkovOptions, draft_block, sample_tokens
from .moe import MoE


class ConfidenceHead(nn.Module):
    """How likely a drafted token is to be accepted, before the sigmoid."""

    def __init__(self, config: DraftConfig, context: BuildContext):
        super().__init__()
        self.proj = Table(1, config.hidden_size + config.markov_rank, dtype=context.dtype)

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Pre-norm hidden [R, B, H] and Markov features [R, B, rank] -> [R, B] float32."""
        return matmul(torch.cat((hidden, features), -1), self.proj.weight).squeeze(-1)


class Stage(HyperConnectedLayer):
    """One draft layer; the first also projects the target features, the last holds the heads."""

    def __init__(self, index: int, config: DraftConfig, context: BuildContext, markov: MarkovOptions):
        super().__init__(f"stage{index}", config, context)
        self.attn = DraftBlockAttention(config, context)
        self.ffn = MoE(config, context)
        eps, hidden = config.rms_norm_eps, config.hidden_size
        if index == 0:
            self.main_proj = Fp8Linear(config.num_features * hidden, hidden, config.weight_block_size, context)
            self.main_norm = RmsNorm(hidden, eps, context.dtype)
        if index == config.num_stages - 1:
            self.norm = RmsNorm(hidden, eps, context.dtype)
            self.markov_head = MarkovHead(config, context, markov.head)
            self.confidence_head = ConfidenceHead(config, context)
            register_hc_head(self, config)


class DraftModel(nn.Module):
    """The rank-local draft; parameters carry the released names (``mtp.{stage}.*``, embed, head).

    ``markov`` and ``sampler``, which chooses the tokens of a sampling draft, are for the torch session; an
    engine has neither.
    """

    def __init__(
        self,
        config: DraftConfig,
        context: BuildContext,
        *,
        sampling: bool = False,
        markov: MarkovOptions | None = None,
    ):
        super().__init__()
        self.config, self.context, self.sampling = config, context, sampling
        self.markov = (markov or MarkovOptions()).checked(config.vocab_size)
        self.sampler: Sampler = sample_tokens
        self.embed = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.head = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.mtp = nn.ModuleList(Stage(s, config, context, self.markov) for s in range(config.num_stages))

    @property
    def plain_sampling(self) -> bool:
        """Whether the MarkovSampling operation, and so an engine, can choose the tokens."""
        return self.markov.released and self.sampler is sample_tokens

    def forward(
        self,
        anchor_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        target_features: Tensor,
        feature_positions: Tensor,
        feature_slots: Tensor,
        kv_rings: list[Tensor],
        mailbox: Tensor | None = None,
        temperature: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Draft one block a request.

        Args:
            anchor_ids, positions, slots: [R] int32; the token just emitted, its position, its slot.
            target_features: [T, num_features * H] captured rows; feature_positions, feature_slots: [T]
                int32, slot -1 for rows that must not be inserted.
            kv_rings: one [S, W, D] a stage.
            mailbox: [P, 2] int32, tensor parallel only.
            temperature, seeds: [R] float32 and [R, 2] int32, with ``sampling`` only.

        Returns:
            draft tokens [R, B] int32, confidence [R, B] float32 before the sigmoid, corrected logits
            [R, B, V] float32 before the temperature, and the updated rings.
        """
        config, probe = self.config, self.context.probe
        stages = cast("list[Stage]", list(self.mtp))
        first, last = stages[0], stages[-1]
        block = (-1, config.block_size)
        main_x = first.main_norm(first.main_proj(target_features))
        probe("main_x", main_x)
        rings = []
        for stage, ring in zip(stages, kv_rings, strict=True):
            kv = stage.attn.key_value(main_x)
            probe(f"{stage.name}_context_kv_normed", kv)
            if self.context.probing:
                probe(f"{stage.name}_context_kv", stage.attn.cached(kv, feature_positions))
            rings.append(stage.attn.insert(kv, feature_positions, feature_slots, ring))

        noise = torch.full_like(anchor_ids, config.noise_token_id).unsqueeze(1).expand(-1, config.block_size - 1)
        ids = torch.cat((anchor_ids.unsqueeze(1), noise), 1).flatten()
        chain = StreamChain(config, self.context, () if mailbox is None else (mailbox,))
        state: Streams | None = None
        partial = x = self.embed.weight[ids.long()]
        for index, (stage, ring) in enumerate(zip(stages, rings, strict=True)):
            attn, ffn = stage.sublayer("attn"), stage.sublayer("ffn")
            state, x = chain.enter(x, attn) if state is None else chain.cross(state, partial, attn)
            if index:
                probe(f"{stages[index - 1].name}_streams", state.values)
            partial = stage.attn(x, positions, slots, ring)
            probe(f"{stage.name}_attn_out", partial)
            state, x = chain.cross(state, partial, ffn)
            probe(f"{stage.name}_mid_streams", state.values)
            partial = stage.ffn(x, ids)
            probe(f"{stage.name}_ffn_out", partial)
        assert state is not None
        state = chain.leave(state, partial)
        probe(f"{last.name}_streams", state.values)
        hidden = collapse_head(last, state, config)
        probe("hidden_prenorm", hidden.unflatten(0, block))

        table = self.head.weight if self.markov.draft_ids is None else self.head.weight[list(self.markov.draft_ids)]
        base_logits = logits(hidden, last.norm, table).unflatten(0, block)
        probe("base_logits", base_logits)
        if self.plain_sampling:
            tokens, features, corrected = MARKOV_SAMPLING(
                base_logits,
                anchor_ids,
                last.markov_head.embed.weight,
                last.markov_head.head.weight,
                *((positions, temperature, seeds) if self.sampling else ()),
                block_size=config.block_size,
                sampling=self.sampling,
            )
        else:
            assert not self.sampling or (temperature is not None and seeds is not None)
            tokens, features, corrected = draft_block(
                last.markov_head,
                self.markov,
                base_logits,
                last.norm(hidden).unflatten(0, block),
                anchor_ids,
                (positions, temperature, seeds) if self.sampling else None,  # type: ignore[arg-type]
                sampler=self.sampler,
            )
        probe("corrected_logits", corrected)
        confidence = last.confidence_head(hidden.unflatten(0, block), features)
        return tokens, confidence, corrected, rings
