"""Typed configuration of a released DeepSeek-V4 / V4.1 checkpoint.

A released ``config.json`` describes two networks at once: the target (the language model) and the
DSpark draft, whose keys start with ``dspark_``. V4 keeps all keys at the root; V4.1 nests the
language-model keys under ``text_config`` and leaves ``quantization_config`` at the root.
:func:`read_configs` accepts both, returns one :class:`TargetConfig` and one :class:`DraftConfig`,
and refuses what it can't account for: a key that is neither consumed nor on the allow-list, a
missing key that would change results, values that contradict each other. Facts of the checkpoint come from the
checkpoint. If a key that only some releases have is missing, it means what the other releases do without it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .json_values import read_object, read_value
from .released_keys import SUPPORTED_QUANTIZATION, SUPPORTED_VALUES, ReleasedKeys

HC_MULT = 4
"""Number of residual streams; the kernels and the released models know no other."""

HeadKind = Literal["vanilla", "gated", "rnn"]
"""What a Markov head's bias depends on: the token before, its row too, or all slots before (spec section 5.1)."""


class ConfigError(ValueError):
    """The configuration is incomplete, unknown or contradicts itself or the tensors."""


class Variant(str, enum.Enum):
    """Data flow of the hyper-connections and of the draft's cache."""

    V4 = "v4"
    V4_1 = "v4.1"


class Numerics(str, enum.Enum):
    """``released``: the released model's arithmetic, quantised activations and weights included.
    ``dequantized``: weights dequantised once, activations not quantised."""

    RELEASED = "released"
    DEQUANTIZED = "dequantized"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What target and draft have in common. Names follow the released ``config.json``."""

    variant: Variant
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_sinkhorn_iters: int
    hc_eps: float
    sliding_window: int
    rope_theta: float
    max_position_embeddings: int
    weight_block_size: int
    """Side of the square FP8 weight blocks, and the group of activations that share a scale."""

    @property
    def kv_quant_width(self) -> int:
        """Leading channels of a cached row that are quantised: V4 leaves the RoPE part alone."""
        nope = self.head_dim - self.qk_rope_head_dim
        return nope if self.variant is Variant.V4 else self.head_dim

    @property
    def kv_quant_group(self) -> int:
        """Channels of a cached row that share one scale (spec section 3.5, step 3)."""
        return 64 if self.variant is Variant.V4 else 32

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise :class:`ConfigError` unless every sharded dimension splits over ``tp_size``."""
        if problems := self._split_problems(tp_size):
            possible = [n for n in range(1, self.o_groups + 1) if not self._split_problems(n)]
            raise ConfigError(
                f"tensor parallel size {tp_size} is not possible: {'; '.join(problems)}. "
                f"Sizes that work for this checkpoint: {possible}"
            )

    def _split_problems(self, tp_size: int) -> list[str]:
        if tp_size < 1:
            return ["it is not positive"]
        problems = [
            f"{name} {getattr(self, name)} does not split over it"
            for name in ("num_attention_heads", "o_groups")
            if getattr(self, name) % tp_size
        ]
        block = self.weight_block_size
        # A whole dimension may end in a partial block of scales, a cut one may not.
        blocked = [("moe_intermediate_size", self.moe_intermediate_size)]
        if tp_size > 1:
            blocked.append(("num_attention_heads x head_dim", self.num_attention_heads * self.head_dim))
            blocked.append(("o_groups x o_lora_rank", self.o_groups * self.o_lora_rank))
        return problems + [
            f"{name} {size} does not split into whole quantisation blocks of {block}"
            for name, size in blocked
            if size % (tp_size * block)
        ]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelConfig):
    """The language model that verifies."""

    num_hidden_layers: int
    compress_ratios: tuple[int, ...]
    """One entry per layer; 0 is plain sliding-window attention."""
    num_hash_layers: int
    """Leading layers whose experts are chosen by token id (``ffn.gate.tid2eid``)."""
    feature_layer_ids: tuple[int, ...]
    """Layers whose mean-over-streams rows feed the draft; V4 captures their output, V4.1 their input."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelConfig):
    """The DSpark draft: ``num_stages`` layers, a Markov head and a confidence head."""

    num_stages: int
    block_size: int
    """Drafted tokens per request; the value the checkpoint was trained with."""
    noise_token_id: int
    markov_rank: int
    num_features: int
    """Captured target layers; ``target_features`` rows are ``num_features * hidden_size`` wide."""
    sample_from_anchor: bool
    """True: row 0 (the anchor) predicts the first draft token, as the released drafts do. False: it is not sampled,
    and as many noise rows as drafts follow it, each of which predicts the token at its own position."""
    markov_head: HeadKind
    logit_scale: float
    logit_softcap: float | None
    """The transform of the draft's logits: x -> c tanh(s x / c), without a cap c just s x."""
    apply_output_logit_transform: bool
    """Whether the Markov head's bias goes through that transform too, before it is added; else it is added as it is."""

    @property
    def block_rows(self) -> int:
        """Rows of a request in a draft pass."""
        return self.block_size + (not self.sample_from_anchor)

    @property
    def transforms_logits(self) -> bool:
        return self.logit_scale != 1 or self.logit_softcap is not None


_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool}
# Fields that are a key of the same name; the functions below work the others out.
_PLAIN_FIELDS = {
    field.name: _KINDS[str(field.type)]
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("variant", "n_routed_experts", "num_experts_per_tok", "weight_block_size")
}


def read_configs(
    path: Path | str, *, num_stages: int | None = None, allow_keys: Iterable[str] = ()
) -> tuple[TargetConfig, DraftConfig]:
    """Return the target and draft configuration of a released checkpoint.

    Args:
        path: a ``config.json`` or the checkpoint directory that holds it.
        num_stages: draft stages counted from the tensor names. V4 says
            ``num_nextn_predict_layers`` 1 although three stages ship; any other difference
            between key and count is an error. Without tensors, V4's 1 is read as three.
        allow_keys: unknown keys to pass over.

    Raises:
        ConfigError: with all problems in one message.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    absent, remedy = "expected that of a released checkpoint; download it again", "download the file again"
    root = read_object(path, ConfigError, absent=absent, remedy=remedy)
    return parse_configs(root, where=str(path), num_stages=num_stages, allow_keys=allow_keys)


def parse_configs(
    root: Mapping[str, Any],
    *,
    where: str = "config.json",
    num_stages: int | None = None,
    allow_keys: Iterable[str] = (),
) -> tuple[TargetConfig, DraftConfig]:
    """As :func:`read_configs`, from the parsed JSON object."""
    keys = ReleasedKeys(root, where)
    common = _parse_common(keys)
    stages = _parse_stages(keys, num_stages)
    target = _parse_target(keys, common, stages)
    draft = _parse_draft(keys, common, target, stages)
    problems = [f"{reader.where}: {problem}" for reader in keys.readers for problem in reader.problems]
    if not problems:
        found = [*_contradictions(target, prefix="dspark_"), *_contradictions(draft, prefix="dspark_")]
        problems = [f"{where}: {problem}" for problem in dict.fromkeys(found)]
    allowed = set(allow_keys)
    for reader in keys.readers:
        if unknown := reader.unknown(allowed):
            problems.append(
                f"{reader.where}: keys that this version does not know: {', '.join(unknown)} "
                "(pass --allow-config-key NAME for each that can't change results)"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return target, draft


def _parse_common(keys: ReleasedKeys) -> dict[str, Any]:
    """The fields that both networks share; keys that have one supported value are checked and left out."""
    text, quantization = keys.text, keys.quantization
    block = quantization.get("weight_block_size", list)
    if len(block) != 2 or block[0] != block[1] or block[0] not in (32, 128):
        quantization.problems.append(f"weight_block_size is {block}, supported: [32, 32] and [128, 128]")
        block = [32, 32]
    for key, allowed in SUPPORTED_QUANTIZATION.items():
        quantization.expect(key, allowed, None)
    (quantization if keys.nested else text).expect("expert_dtype", ("fp4",))

    text.expect("hc_mult", (HC_MULT,))
    text.expect("scoring_func", ("sqrtsoftplus",))
    text.expect("n_shared_experts", (1,))
    for key, allowed in SUPPORTED_VALUES.items():
        text.expect(key, allowed, None)
    keys.root.expect("tie_word_embeddings", (False,), None)
    plain = {name: text.get(name, kind) for name, kind in _PLAIN_FIELDS.items()}
    return plain | {"variant": Variant.V4_1 if keys.nested else Variant.V4, "weight_block_size": block[0]}


def _parse_stages(keys: ReleasedKeys, counted: int | None) -> int:
    """The number of draft stages; ``counted`` ones are those that have tensors."""
    declared = keys.text.get("num_nextn_predict_layers", int)
    known_trap = not keys.nested and declared == 1
    if counted is None:
        return 3 if known_trap else declared
    if counted != declared and not known_trap:
        keys.text.problems.append(
            f"num_nextn_predict_layers is {declared}, but the checkpoint holds {counted} draft stages "
            "(mtp.0 and up); one of the two is incomplete"
        )
    return counted


def _parse_target(keys: ReleasedKeys, common: Mapping[str, Any], stages: int) -> TargetConfig:
    text = keys.text
    layers, ratios = text.get("num_hidden_layers", int), text.int_list("compress_ratios")
    if len(ratios) not in (layers, layers + stages):
        text.problems.append(
            f"compress_ratios has {len(ratios)} entries, expected {layers} (layers) or "
            f"{layers + stages} (layers and draft stages)"
        )
    if any(ratios[layers:]):
        text.problems.append(f"compress_ratios of the draft stages are {ratios[layers:]}, supported: 0")

    # V4.1 nests the language model, but keeps the token ids at the root.
    ids = {key: text.values.get(key, keys.root.values.get(key)) for key in ("bos_token_id", "eos_token_id")}
    for reader in (text, keys.root):
        reader.consumed |= ids.keys()
    eos = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    for key, values in (("bos_token_id", [ids["bos_token_id"] or 0]), ("eos_token_id", eos)):
        if not values or not all(type(value) is int for value in values):
            text.problems.append(f"{key} is {ids[key]!r}, expected a token id")

    return TargetConfig(
        **common,
        n_routed_experts=text.get("n_routed_experts", int),
        num_experts_per_tok=text.get("num_experts_per_tok", int),
        num_hidden_layers=layers,
        compress_ratios=ratios[:layers],
        # V4.1 has no such layers and no such key.
        num_hash_layers=text.get("num_hash_layers", int, 0 if keys.nested else dataclasses.MISSING),
        feature_layer_ids=text.int_list("dspark_target_layer_ids"),
        bos_token_id=ids["bos_token_id"],
        eos_token_ids=tuple(eos),
    )


def _parse_draft(keys: ReleasedKeys, common: Mapping[str, Any], target: TargetConfig, stages: int) -> DraftConfig:
    text = keys.text
    experts, top_k = target.n_routed_experts, target.num_experts_per_tok
    if keys.nested:
        experts = text.get("dspark_n_routed_experts", int)
        other = text.get("dspark_n_activated_experts", int, None)  # the inference configuration's name
        top_k = text.get("dspark_num_experts_per_tok", int, dataclasses.MISSING if other is None else other)
        if other not in (None, top_k):
            both = f"dspark_n_activated_experts is {other}, dspark_num_experts_per_tok {top_k}"
            text.problems.append(f"{both}, expected the same; leave out the one that is wrong")
    text.expect("dspark_markov_head_type", get_args(HeadKind), "vanilla")
    transformed = text.values.keys() & {"dspark_logit_scale", "dspark_final_logit_softcapping"}
    unless_transformed = dataclasses.MISSING if transformed else False
    return DraftConfig(
        **common,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        num_stages=stages,
        block_size=text.get("dspark_block_size", int),
        noise_token_id=text.get("dspark_noise_token_id", int),
        markov_rank=text.get("dspark_markov_rank", int),
        num_features=len(target.feature_layer_ids),
        sample_from_anchor=text.get("dspark_sample_from_anchor", bool, True),
        markov_head=text.values.get("dspark_markov_head_type", "vanilla"),
        logit_scale=text.get("dspark_logit_scale", float, 1.0),
        logit_softcap=text.get("dspark_final_logit_softcapping", float, None),
        apply_output_logit_transform=text.get("dspark_apply_output_logit_transform", bool, unless_transformed),
    )


def _contradictions(config: ModelConfig, *, prefix: str) -> list[str]:
    """Values out of range; ``prefix`` is what the released names of the draft's keys start with."""
    found = []
    may_be_zero = ("noise_token_id", "num_hash_layers")
    numbers = [f.name for f in dataclasses.fields(config) if f.type in ("int", "float") and f.name not in may_be_zero]
    found += [f"{n} is {getattr(config, n)}, expected > 0" for n in numbers if not getattr(config, n) > 0]
    if config.num_experts_per_tok > config.n_routed_experts:
        found.append(
            f"{type(config).__name__}: {config.num_experts_per_tok} experts per token of "
            f"{config.n_routed_experts} experts"
        )
    if config.head_dim <= config.qk_rope_head_dim or config.qk_rope_head_dim % 2:
        found.append(f"qk_rope_head_dim {config.qk_rope_head_dim} must be even and below head_dim {config.head_dim}")
    if config.kv_quant_width % config.kv_quant_group:
        found.append(
            f"{config.kv_quant_width} channels of a cached row are quantised, expected a multiple of "
            f"{config.kv_quant_group}"
        )
    if config.o_groups and config.num_attention_heads % config.o_groups:
        found.append(f"o_groups {config.o_groups} does not divide num_attention_heads {config.num_attention_heads}")
    if not config.norm_topk_prob:
        found.append("norm_topk_prob is false; only normalised routing weights are supported")
    if isinstance(config, TargetConfig):
        ids, layers = config.feature_layer_ids, config.num_hidden_layers
        if not ids or len(set(ids)) != len(ids) or any(not 0 <= i < layers for i in ids):
            key = f"{prefix}target_layer_ids" if prefix else "feature_layer_ids"
            found.append(f"{key} is {list(ids)}, expected distinct layers of 0..{layers - 1}")
        if not 0 <= config.num_hash_layers <= layers:
            found.append(f"num_hash_layers is {config.num_hash_layers}, expected 0..{layers}")
    if isinstance(config, DraftConfig):
        if config.logit_softcap is not None and not config.logit_softcap > 0:
            key = f"{prefix}final_logit_softcapping" if prefix else "logit_softcap"
            found.append(f"{key} is {config.logit_softcap}, expected > 0, or null for no cap")
        if not 0 <= config.noise_token_id < config.vocab_size:
            found.append(f"{prefix}noise_token_id is {config.noise_token_id}, expected 0..{config.vocab_size - 1}")
    return found


def check_draft_length(draft: DraftConfig, num_draft_tokens: int) -> None:
    """Raise :class:`ConfigError` unless ``num_draft_tokens`` is the block the draft was trained with.

    Attention inside a block is not causal, so another number of rows changes *every* row, and fewer drafts are
    accepted without an error.
    """
    if num_draft_tokens != draft.block_size:
        raise ConfigError(
            f"{num_draft_tokens} draft tokens requested, but this draft was trained with blocks of "
            f"{draft.block_size}; leave the option out or pass {draft.block_size}"
        )


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """A JSON-ready copy of ``config``; :func:`from_dict` is its inverse."""
    values = dataclasses.asdict(config)
    return {
        k: v.value if isinstance(v, enum.Enum) else list(v) if isinstance(v, tuple) else v for k, v in values.items()
    }


def networks_from_dict(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """``target``, which may be None, and ``draft`` of a header; what is wrong is added to ``problems``."""
    configs: dict[str, Any] = {"target": None}
    for name, kind in (("target", TargetConfig), ("draft", DraftConfig)):
        try:
            if name == "draft" or values.get(name) is not None:
                configs[name] = from_dict(kind, values.get(name), name)
        except ConfigError as error:
            problems.append(str(error))
    return configs


def from_dict(kind: type[ModelConfig], values: Any, where: str | None = None) -> Any:
    """Rebuild ``kind`` from :func:`to_dict`'s output, called ``where`` in messages.

    Raises:
        ConfigError: unknown or missing keys, values of another type or out of range, all in one line.
    """
    problems: list[str] = []
    where = where or kind.__name__
    config = read_value(kind, values, where, problems)
    problems = problems or [f"{where}: {problem}" for problem in _contradictions(config, prefix="")]
    if problems:
        raise ConfigError("; ".join(problems))
    return config
