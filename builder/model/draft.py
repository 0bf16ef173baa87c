"""The DSpark draft network (spec sections 3.2 to 5.3).

One call advances every request: the captured target rows of its last step become entries of the
stages' rings, and a block of rows - the anchor and noise tokens - is drafted against them.
Draft rows carry no target state themselves; what the target knows arrives through the rings alone.

Most drafts have B rows for B tokens, row 0 (the anchor) predicting the first of them. A draft that does not
sample from the anchor has B + 1, and row 0 predicts nothing. Either way the block begins at the anchor's
position, and the token in front of slot i, and so its bias and its noise, are the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...plugins.markov_sampling import MARKOV_SAMPLING, Sampler
from ...plugins.markov_sampling_sharded import MARKOV_SAMPLING_SHARDED
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
from .markov import MarkovHead, MarkovOptions, draft_block, transform_logits
from .markov_parallel import Loop, LoopPlan, split_by_requests, vocabulary_shard
from .moe import MoE

Keys = tuple[Tensor, Tensor, Tensor]
"""Positions, temperature and seeds of a sampling draft's requests."""


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

    def __init__(self, index: int, config: DraftConfig, context: BuildContext):
        super().__init__(f"stage{index}", config, context, first=index == 0)
        self.attn = DraftBlockAttention(config, context)
        self.ffn = MoE(config, context)
        eps, hidden = config.rms_norm_eps, config.hidden_size
        if index == 0:
            self.main_proj = Fp8Linear(config.num_features * hidden, hidden, config.weight_block_size, context)
            self.main_norm = RmsNorm(hidden, eps, context.dtype)
        if index == config.num_stages - 1:
            self.norm = RmsNorm(hidden, eps, context.dtype)
            self.markov_head = MarkovHead(config, context)
            self.confidence_head = ConfidenceHead(config, context)
            register_hc_head(self, config)

    def main_x(self, target_features: Tensor) -> Tensor:
        """Captured target rows [T, F H] -> what all stages attend to, [T, H]; the first stage's.

        float16 ends at 65504, which a sum over F H channels with large ones among them passes, so in float16 the
        projection stays float32 until it is normalised.
        """
        if target_features.dtype != torch.float16:
            return cast(Tensor, self.main_norm(self.main_proj(target_features)))
        projected = matmul(target_features, self.main_proj.weight)
        return cast(Tensor, self.main_norm(projected)).to(target_features.dtype)


class DraftModel(nn.Module):
    """The rank-local draft; parameters carry the released names (``mtp.{stage}.*``, embed, head).

    ``markov`` but for its noise, ``loops`` and ``sampler``, which chooses the tokens of a sampling draft in place
    of the operation, are for the torch session; an engine has none of them.
    """

    def __init__(
        self,
        config: DraftConfig,
        context: BuildContext,
        *,
        sampling: bool = False,
        markov: MarkovOptions | None = None,
        loops: LoopPlan | None = None,
    ):
        super().__init__()
        self.config, self.context, self.sampling, self.loops = config, context, sampling, loops
        self.markov = (markov or MarkovOptions()).checked(config)
        self.sampler: Sampler | None = None
        self.embed = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.head = Table(config.vocab_size, config.hidden_size, dtype=context.dtype)
        self.mtp = nn.ModuleList(Stage(s, config, context) for s in range(config.num_stages))

    @property
    def plain_sampling(self) -> bool:
        """Whether the MarkovSampling operation, and so an engine, can choose the tokens."""
        known = self.config.markov_head == "vanilla" and not self.config.transforms_logits
        return known and self.markov.plain and self.sampler is None

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
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Draft one block per request.

        Args:
            anchor_ids, positions, slots: [R] int32; the token just emitted, its position, its slot.
            target_features: [T, num_features * H] captured rows; feature_positions, feature_slots: [T]
                int32, slot -1 for rows that must not be inserted.
            kv_rings: one [S, W, D] a stage.
            mailbox: [P, 2] int32, tensor parallel only.
            temperature, seeds: [R] float32 and [R, 2] int32, with ``sampling`` only.

        Returns:
            draft tokens [R, B] int32, confidence [R, B] float32 before the sigmoid, corrected logits
            [R, B, V] float32 before the temperature, and the updated rings. There are logits with ``sampling``,
            unless ``loops`` split them, and for a probe.
        """
        config, probe = self.config, self.context.probe
        stages = cast("list[Stage]", list(self.mtp))
        first, last = stages[0], stages[-1]
        main_x = first.main_x(target_features)
        probe("main_x", main_x)
        rings = []
        for stage, ring in zip(stages, kv_rings, strict=True):
            kv = stage.attn.key_value(main_x)
            probe(f"{stage.name}_context_kv_normed", kv)
            if self.context.probing:
                probe(f"{stage.name}_context_kv", stage.attn.cached(kv, feature_positions))
            rings.append(stage.attn.insert(kv, feature_positions, feature_slots, ring))

        noise = torch.full_like(anchor_ids, config.noise_token_id).unsqueeze(1).expand(-1, config.block_rows - 1)
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
        hidden = collapse_head(last, state, config).unflatten(0, (-1, config.block_rows))
        if not config.sample_from_anchor:
            hidden = hidden[:, 1:]
        probe("hidden_prenorm", hidden)
        keys = cast("Keys", (positions, temperature, seeds)) if self.sampling else None
        return *self._sample(last, hidden, anchor_ids, keys, mailbox), rings

    def _sample(
        self, last: Stage, hidden: Tensor, anchor_ids: Tensor, keys: Keys | None, mailbox: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, confidence and, where they are wanted, corrected logits of the sampled rows [R, B, H]."""
        config, probe, options = self.config, self.context.probe, self.markov
        if (loop := self._loop(anchor_ids)) is not Loop.WHOLE:
            return (*self._sample_split(loop, last, hidden, anchor_ids, keys, mailbox), None)
        table = self.head.weight if options.draft_ids is None else self.head.weight[list(options.draft_ids)]
        base_logits = transform_logits(config, self._logits(last, hidden, table))
        probe("base_logits", base_logits)
        corrected: Tensor | None = None
        if self.plain_sampling:
            wanted = self.sampling or self.context.probing
            tokens, features, *written = self._whole_loop(last, base_logits, anchor_ids, keys, write_logits=wanted)
            corrected = written[0] if wanted else None
        else:
            normed = last.norm(hidden)
            tokens, features, corrected = draft_block(
                last.markov_head, options, base_logits, normed, anchor_ids, keys, sampler=self.sampler
            )
        if corrected is not None:
            probe("corrected_logits", corrected)
        return tokens, last.confidence_head(hidden, features), corrected

    def _loop(self, anchor_ids: Tensor) -> Loop:
        """An engine, a probe and a sampler of the caller's want the whole loop, whatever was planned."""
        if self.loops is None or self.sampler or self.context.probing or torch.onnx.is_in_onnx_export():
            return Loop.WHOLE
        return self.loops.loop(len(anchor_ids))

    def _sample_split(
        self,
        loop: Loop,
        last: Stage,
        hidden: Tensor,
        anchor_ids: Tensor,
        keys: Keys | None,
        mailbox: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and confidence of all requests from this rank's part of the base logits."""
        plan, vocab = cast("LoopPlan", self.loops), self.config.vocab_size
        place = {"tp_size": plan.tp_size, "rank": plan.rank}
        base_logits = self._logits(last, hidden, vocabulary_shard(self.head.weight, **place))
        if loop is Loop.BY_REQUESTS:

            def own_block(whole: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
                own_keys = cast("Keys", tuple(key[rows] for key in keys)) if keys else None
                tokens, features = self._whole_loop(last, whole, anchor_ids[rows], own_keys, write_logits=False)
                return tokens, last.confidence_head(hidden[rows], features)

            return split_by_requests(base_logits, vocab, own_block, **place)
        tables = last.markov_head.embed.weight, vocabulary_shard(last.markov_head.head.weight, **place)
        inputs = base_logits, anchor_ids, *tables, *(keys or ()), *(() if mailbox is None else (mailbox,))
        tokens, features = MARKOV_SAMPLING_SHARDED(*inputs, **self._loop_attributes(keys), **place)
        return tokens, last.confidence_head(hidden, features)

    def _logits(self, last: Stage, hidden: Tensor, table: Tensor) -> Tensor:
        return logits(hidden.flatten(0, 1), last.norm, table).unflatten(0, (-1, self.config.block_size))

    def _whole_loop(
        self, last: Stage, base_logits: Tensor, anchor_ids: Tensor, keys: Keys | None, *, write_logits: bool
    ) -> tuple[Tensor, ...]:
        tables = last.markov_head.embed.weight, last.markov_head.head.weight
        inputs = base_logits, anchor_ids, *tables, *(keys or ())
        outputs: tuple[Tensor, ...] = MARKOV_SAMPLING(*inputs, **self._loop_attributes(keys), write_logits=write_logits)
        return outputs

    def _loop_attributes(self, keys: Keys | None) -> dict[str, Any]:
        """What the whole loop and its part on one rank are told alike."""
        sampling = keys is not None
        wide = sampling and self.markov.float64_noise
        return {"block_size": self.config.block_size, "sampling": sampling, "float64_noise": wide}
