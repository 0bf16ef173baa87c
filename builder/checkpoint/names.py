"""The tensors of a released checkpoint as a table (spec section 2).

:func:`released_tensors` spells out every name of a draft, and of a target when one is given, with dtype,
shape, its place in the model and the dimension that tensor parallelism splits. Names are looked up in that
table and never matched by patterns, so ``markov_w1`` can't be taken for an expert's ``w1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...plugins.numerics import FP4_BLOCK
from ..config import HC_MULT, DraftConfig, ModelConfig, TargetConfig, Variant
from .quantization import scale_shape
from .tensor_file import CheckpointError, StoredTensor

HC_MIXES = (2 + HC_MULT) * HC_MULT
"""Rows of ``hc_*_fn``: pre, post and comb coefficients of one sublayer."""

_MARKOV_NAMES = {Variant.V4: ("markov_w1", "markov_w2"), Variant.V4_1: ("embed", "head")}
_MARKOV_PROJECTIONS = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}
"""Of heads that are not vanilla: name, and how many ranks wide outputs are and, beside the hidden row, inputs."""


@dataclass(frozen=True)
class TensorEntry:
    """What a released tensor is and where it goes."""

    dtypes: tuple[str, ...]
    """Dtypes it may have, as safetensors names them."""
    shape: tuple[int, ...]
    model_name: str | None
    """Name in the model; None for a tensor that is read and dropped on purpose."""
    expert: int | None = None
    """Place along the first dimension of the model's tensor, which stacks the experts."""
    split: int | None = None
    """Dimension that tensor parallelism splits; None is replicated."""
    scale: str | None = None
    """Released scale that conversion multiplies in, so that the model has BF16 and no scale."""


class _Table:
    def __init__(self, config: ModelConfig):
        self.entries: dict[str, TensorEntry] = {}
        self.block = config.weight_block_size

    def plain(self, name: str, dtype: str, *shape: int, **where: Any) -> None:
        self.entries[name] = TensorEntry((dtype,), shape, **{"model_name": name, **where})

    def fp8(self, module: str, *shape: int, **where: Any) -> None:
        self.plain(f"{module}.weight", "F8_E4M3", *shape, **where)
        self.plain(f"{module}.scale", "F8_E8M0", *scale_shape(shape, self.block), **where)

    def expert(self, module: str, index: int, matrix: str, rows: int, columns: int, split: int) -> None:
        for part, dtype, width in (("weight", "I8", columns // 2), ("scale", "F8_E8M0", columns // FP4_BLOCK)):
            stacked = f"{module}.{matrix}.{part}"
            self.plain(
                f"{module}.{index}.{matrix}.{part}", dtype, rows, width, model_name=stacked, expert=index, split=split
            )


def released_tensors(target: TargetConfig | None, draft: DraftConfig) -> dict[str, TensorEntry]:
    """Every tensor of a draft, the embedding and head that it shares, and of ``target`` unless None.

    Raises:
        CheckpointError: when FP4 weights would end in the middle of a block of 32 channels.
    """
    keys = ("hidden_size", "moe_intermediate_size")
    if odd := [f"{key} {getattr(draft, key)}" for key in keys if getattr(draft, key) % FP4_BLOCK]:
        raise CheckpointError(
            f"{', '.join(odd)}: FP4 expert weights need multiples of {FP4_BLOCK} channels; compare config.json "
            "with that of the release"
        )
    table = _Table(draft)
    hidden, vocab, rank = draft.hidden_size, draft.vocab_size, draft.markov_rank
    table.plain("embed.weight", "BF16", vocab, hidden)
    table.plain("head.weight", "BF16", vocab, hidden)
    for stage in range(draft.num_stages):
        _add_layer(table, f"mtp.{stage}", draft)
    table.fp8("mtp.0.main_proj", hidden, draft.num_features * hidden)
    table.plain("mtp.0.main_norm.weight", "BF16", hidden)
    last = f"mtp.{draft.num_stages - 1}"
    table.plain(f"{last}.norm.weight", "BF16", hidden)
    for released, name in zip(_MARKOV_NAMES[draft.variant], ("embed", "head"), strict=True):
        model_name = f"{last}.markov_head.{name}.weight"
        table.plain(f"{last}.markov_head.{released}.weight", "BF16", vocab, rank, model_name=model_name)
    if draft.markov_head in _MARKOV_PROJECTIONS:
        name, outputs, inputs = _MARKOV_PROJECTIONS[draft.markov_head]
        table.plain(f"{last}.markov_head.{name}.weight", "BF16", outputs * rank, inputs * rank + hidden)
        table.plain(f"{last}.markov_head.{name}.bias", "BF16", outputs * rank)
    table.plain(f"{last}.confidence_head.proj.weight", "BF16", 1, hidden + rank)
    if draft.variant is Variant.V4:
        _add_head_collapse(table, f"{last}.", hidden)
    if target is not None:
        for layer in range(target.num_hidden_layers):
            _add_layer(table, f"layers.{layer}", target, hashed=layer < target.num_hash_layers)
        table.plain("norm.weight", "BF16", hidden)
        if target.variant is Variant.V4:
            _add_head_collapse(table, "", hidden)
    return table.entries


def _add_layer(table: _Table, layer: str, config: ModelConfig, *, hashed: bool = False) -> None:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    q_rank, out_rank, inner = config.q_lora_rank, config.o_groups * config.o_lora_rank, config.moe_intermediate_size
    experts = config.n_routed_experts
    attn, ffn = f"{layer}.attn", f"{layer}.ffn"

    table.plain(f"{attn}.attn_sink", "F32", heads, split=0)
    table.fp8(f"{attn}.wq_a", q_rank, hidden)
    table.plain(f"{attn}.q_norm.weight", "BF16", q_rank)
    table.fp8(f"{attn}.wq_b", heads * width, q_rank, split=0)
    table.fp8(f"{attn}.wkv", width, hidden)
    table.plain(f"{attn}.kv_norm.weight", "BF16", width)
    group_output = (out_rank, heads * width // config.o_groups)
    wo_a, wo_a_scale = f"{attn}.wo_a.weight", f"{attn}.wo_a.scale"
    table.plain(wo_a, "F8_E4M3", *group_output, split=0, scale=wo_a_scale)
    table.plain(wo_a_scale, "F8_E8M0", *scale_shape(group_output, table.block), model_name=wo_a)
    table.fp8(f"{attn}.wo_b", hidden, out_rank, split=1)

    table.plain(f"{ffn}.gate.weight", "BF16", experts, hidden)
    if hashed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        name = f"{ffn}.gate.tid2eid"
        table.entries[name] = TensorEntry(("I64", "I32"), shape, name)
    else:
        table.plain(f"{ffn}.gate.bias", "F32", experts)
        if config.variant is Variant.V4_1:
            # The router bias of image tokens; text never reads it.
            table.plain(f"{ffn}.gate.bias_vl", "F32", experts, model_name=None)
    for matrix, shape, split in (("w1", (inner, hidden), 0), ("w2", (hidden, inner), 1), ("w3", (inner, hidden), 0)):
        table.fp8(f"{ffn}.shared_experts.{matrix}", *shape, split=split)
        for index in range(experts):
            table.expert(f"{ffn}.experts", index, matrix, *shape, split=split)

    for sublayer in ("attn", "ffn"):
        table.plain(f"{layer}.{sublayer}_norm.weight", "BF16", hidden)
        table.plain(f"{layer}.hc_{sublayer}_fn", "F32", HC_MIXES, HC_MULT * hidden)
        table.plain(f"{layer}.hc_{sublayer}_base", "F32", HC_MIXES)
        table.plain(f"{layer}.hc_{sublayer}_scale", "F32", 3)


def _add_head_collapse(table: _Table, prefix: str, hidden: int) -> None:
    table.plain(f"{prefix}hc_head_fn", "F32", HC_MULT, HC_MULT * hidden)
    table.plain(f"{prefix}hc_head_base", "F32", HC_MULT)
    table.plain(f"{prefix}hc_head_scale", "F32", 1)


def count_stages(names: Iterable[str]) -> int:
    """How many draft stages ``mtp.0``, ``mtp.1``, ... the tensor names hold.

    The names are the only witness: V4 configurations say one although three stages ship.

    Raises:
        CheckpointError: when there is none or a number is left out.
    """
    stages = {int(match[1]) for name in names if (match := re.match(r"mtp\.(0|[1-9]\d*)\.", name))}
    if not stages:
        raise CheckpointError(
            "no tensor is called mtp.0.*, expected those of a DSpark draft; pass the release that has one"
        )
    if gaps := sorted(set(range(max(stages))) - stages):
        raise CheckpointError(
            f"draft stages {sorted(stages)} have tensors and {gaps} have none; download the checkpoint again"
        )
    return len(stages)


def check_tensors(
    table: Mapping[str, TensorEntry],
    stored: Mapping[str, StoredTensor],
    names: Iterable[str],
    *,
    draft: DraftConfig,
    draft_only: bool,
) -> None:
    """Raise :class:`CheckpointError` unless ``stored``, found for ``table``, is exactly what it lists.

    ``names`` are all names of the checkpoint; those outside ``mtp.`` are no concern of a draft alone.
    """
    problems = []
    unknown = sorted(n for n in set(names) - set(table) if n.startswith("mtp.") or not draft_only)
    collapse = sorted(n for n in names if n.split(".")[-1].startswith("hc_head_"))
    if draft.variant is Variant.V4_1 and collapse:
        problems.append(
            f"the configuration is V4.1's, which collapses the streams with the last pre-mix, but there are tensors "
            f"of V4's learned collapse: {', '.join(collapse)}; config.json and the tensors belong to different releases"
        )
    if missing := sorted(set(table) - set(stored)):
        problems.append(f"{len(missing)} missing: {', '.join(missing)}")
    if unknown:
        problems.append(f"{len(unknown)} not known: {', '.join(unknown)}")
    for name, tensor in stored.items():
        entry = table[name]
        if tensor.dtype not in entry.dtypes:
            problems.append(f"{name} has dtype {tensor.dtype}, expected {' or '.join(entry.dtypes)}")
        if tensor.shape != entry.shape:
            problems.append(f"{name} has shape {[*tensor.shape]}, config.json makes it {[*entry.shape]}")
    if problems:
        raise CheckpointError("\n".join(["the tensors are not those that config.json describes", *problems]))
