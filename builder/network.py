"""A rank's network as a function from named tensors to named tensors.

The same object is what the torch session runs, what the exporter traces and what an engine computes:
:class:`NetworkIO` fixes names, dtypes, shapes and their order for all three.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .build_config import BuildConfig, Kind
from .checkpoint.loading import load_shard, rank_file_name, read_shard_config
from .checkpoint.tensor_file import CheckpointError
from .config import DraftConfig, TargetConfig
from .model.context import BuildContext, ignore
from .model.draft import DraftModel
from .model.markov import MarkovOptions
from .model.markov_parallel import plan_loops
from .model.target import TargetModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of an input or output; R (requests) and T (rows of a call) are dynamic."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class NetworkIO:
    """Inputs and outputs in order, and output name -> name of the input whose memory it shares."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    aliases: dict[str, str]


def target_ring_rows(config: TargetConfig) -> int:
    """Rows of a target ring: the window, and as many again for the rows of one call of a request."""
    return 2 * config.sliding_window


def draft_io(config: DraftConfig, context: BuildContext, *, slots: int, sampling: bool) -> NetworkIO:
    """The draft's names and shapes."""
    i32, f32, act = torch.int32, torch.float32, context.dtype
    ring = (slots, config.sliding_window, config.head_dim)
    block = config.block_size
    inputs = [TensorInfo(name, i32, ("R",)) for name in ("anchor_ids", "positions", "slots")]
    inputs.append(TensorInfo("target_features", act, ("T", config.num_features * config.hidden_size)))
    inputs += [TensorInfo(name, i32, ("T",)) for name in ("feature_positions", "feature_slots")]
    outputs = [TensorInfo("draft_tokens", i32, ("R", block)), TensorInfo("confidence", f32, ("R", block))]
    keys = []
    if sampling:
        outputs.append(TensorInfo("draft_logits", f32, ("R", block, config.vocab_size)))
        keys = [TensorInfo("temperature", f32, ("R",)), TensorInfo("seeds", i32, ("R", 2))]
    return _with_rings(inputs, outputs, ring, config.num_stages, context, keys)


def target_io(config: TargetConfig, context: BuildContext, *, slots: int) -> NetworkIO:
    """The target's names and shapes."""
    ring = (slots, target_ring_rows(config), config.head_dim)
    inputs = [TensorInfo(name, torch.int32, ("T",)) for name in ("input_ids", "positions", "slots")]
    outputs = [
        TensorInfo("logits", torch.float32, ("T", config.vocab_size)),
        TensorInfo("target_features", context.dtype, ("T", len(config.feature_layer_ids) * config.hidden_size)),
    ]
    return _with_rings(inputs, outputs, ring, config.num_hidden_layers, context, [])


def _with_rings(
    inputs: list[TensorInfo],
    outputs: list[TensorInfo],
    ring: tuple[int, ...],
    rings: int,
    context: BuildContext,
    keys: list[TensorInfo],
) -> NetworkIO:
    names = [f"kv_ring_{i}" for i in range(rings)]
    inputs = inputs + [TensorInfo(name, context.dtype, ring) for name in names]
    if context.tp_size > 1:
        inputs.append(TensorInfo("mailbox", torch.int32, (context.tp_size, 2)))
    outputs = outputs + [TensorInfo(f"{name}_out", context.dtype, ring) for name in names]
    return NetworkIO(tuple(inputs + keys), tuple(outputs), {f"{name}_out": name for name in names})


class Network(nn.Module):
    """A loaded model behind its :class:`NetworkIO`; positional tensors in, positional tensors out."""

    def __init__(self, model: DraftModel | TargetModel, io: NetworkIO):
        super().__init__()
        self.model, self.io = model.eval(), io

    @property
    def context(self) -> BuildContext:
        return self.model.context

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip((i.name for i in self.io.inputs), tensors, strict=True))
        rings = [named.pop(name) for name in self.io.aliases.values()]
        if isinstance(self.model, DraftModel):
            tokens, confidence, logits, rings = self.model(kv_rings=rings, **named)
            heads = (tokens, confidence, logits) if self.model.sampling else (tokens, confidence)
        else:
            logits, features, rings = self.model(kv_rings=rings, **named)
            heads = (logits, features)
        return (*heads, *rings)


def load_network(
    kind: Kind,
    shards: Path,
    rank: int,
    build: BuildConfig,
    *,
    probe: Callable[[str, Tensor], None] = ignore,
    markov: MarkovOptions | None = None,
    online_acceptance: bool = False,
    check_bytes: bool = True,
) -> Network:
    """A rank's draft or target with its weights, as ``build`` wants it, on the CPU.

    Args:
        markov: changes how a draft chooses its tokens, all but the noise for the torch session only.
        online_acceptance: acceptance will be estimated while decoding, which keeps the draft's sampling whole.
        check_bytes: compare the rank's file with what was written; False where that was done already.

    Raises:
        CheckpointError: the shards are incomplete or damaged, don't hold that network or rank, or do not fit it.
        ConfigError: numerics and dtype, or ``markov`` and the draft, contradict each other, or the target has
            compressed attention.
    """
    config = read_shard_config(shards)
    if not 0 <= rank < config.tp_size:
        raise CheckpointError(f"{shards}: holds ranks 0..{config.tp_size - 1}, rank {rank} was asked for")
    dtype = getattr(torch, build.dtype)
    context = BuildContext(build.numerics, dtype, config.tp_size, probe)
    slots = build.max_batch_size
    model: DraftModel | TargetModel
    if kind == "draft":
        options = markov or MarkovOptions()
        options = dataclasses.replace(options, float64_noise=options.float64_noise or build.float64_noise)
        loops = plan_loops(
            config.draft,
            options,
            tp_size=config.tp_size,
            rank=rank,
            vocabulary_from=build.vocabulary_split_from,
            requests_from=build.request_split_from,
            draft_logits=build.sampling,
            online_acceptance=online_acceptance,
        )
        if rank == 0 and config.tp_size > 1:
            logger.info("draft sampling on %d ranks in torch: %s", config.tp_size, loops)
        model = DraftModel(config.draft, context, sampling=build.sampling, markov=options, loops=loops)
        io = draft_io(config.draft, context, slots=slots, sampling=build.sampling)
    elif config.target is None:
        raise CheckpointError(f"{shards}: holds the draft only; convert again without --draft-only to get the target")
    else:
        model = TargetModel(config.target, context)
        io = target_io(config.target, context, slots=slots)
    load_shard(model, shards / rank_file_name(rank), network=kind, check_bytes=check_bytes)
    return Network(model, io)
