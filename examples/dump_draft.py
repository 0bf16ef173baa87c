"""Writes one DSpark draft step with every intermediate tensor to a safetensors file.

    python examples/dump_draft.py --checkpoint DIR --prompt-ids prompts.txt --output step.safetensors

For people whose draft deviates from a reference: run both on the same prompt and compare tensor by tensor.
Each prompt goes through the target, whose greedy next token becomes the request's anchor, and one draft
step runs after it. With R requests, N context rows (all rows of all prompts), F captured layers, hidden size H,
B drafted tokens, blocks of P rows (B, or B + 1 where the anchor is not sampled), cache rows of D channels and a
vocabulary of V, the file holds

    anchor_ids [R]  context_features [N, F * H]  context_positions, context_request [N]
    anchor_positions [R]  positions [R, P]  main_x [N, H]
    and for each stage s, prefixed stage{s}_:
        context_kv [N, D]                           the rows as cached: rotated, and rounded in released mode
        attn_in, ffn_in [R, P, H]                   collapsed streams, before the norm
        attn_out, ffn_out [R, P, H]                 the sublayers' outputs
        mid_streams, streams [R, P, 4, H]           after the attention, after the experts
        attn_pre, attn_post, ffn_pre, ffn_post [R, P, 4]
        attn_comb, ffn_comb [R, P, 4 (source), 4 (target)]
    hidden_prenorm [R, B, H]  base_logits, corrected_logits [R, B, V], of the rows that are sampled
    draft_tokens [R, B]  confidence [R, B], before the sigmoid

Activations keep the type that they are computed in (bfloat16 in released mode), coefficients, logits and
confidence are float32, ids and positions int32. A draft's rings hold the last window of rows; earlier ones
are in the file, but no draft row sees them.

Where this package can't run the target (compressed attention), give what the target would have given:
``--features FILE.safetensors`` with anchor_ids, context_features, context_positions and context_request.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from _common import Output, check_output, read_text
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import Checkpoint, convert_checkpoint, count_stages, read_shard_config
from dspark_trt.builder.cli import USER_ERRORS
from dspark_trt.builder.config import DraftConfig, Numerics, TargetConfig, read_configs
from dspark_trt.builder.network import Network, load_network
from dspark_trt.builder.onnx_export import Probes
from dspark_trt.plugins.markov_sampling_sharded import MAX_REQUESTS
from dspark_trt.runtime_py.communicator import LaunchError, launcher_ranks
from dspark_trt.runtime_py.output_files import OutputError, writing
from dspark_trt.runtime_py.requests import RequestError
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

STAGE_TENSORS = (
    "context_kv",
    "attn_in",
    "attn_out",
    "ffn_in",
    "ffn_out",
    "mid_streams",
    "streams",
    "attn_pre",
    "attn_post",
    "ffn_pre",
    "ffn_post",
    "attn_comb",
    "ffn_comb",
)


class DumpError(ValueError):
    """The prompts or the features can't be used with this checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write one DSpark draft step with every intermediate tensor to a safetensors file."""

    checkpoint: Path
    """Released checkpoint: config.json and safetensors."""
    output: Path
    """The safetensors file to write."""
    prompt_ids: Path | None = None
    """Token ids: one request a line, separated by spaces or commas, or a JSON list of lists."""
    features: Path | None = None
    """Instead of prompts: a safetensors file with what the target gave (see the head of this script)."""
    mode: Literal["released", "dequantized"] = "released"
    """Numerics: the released model's arithmetic, or dequantised weights and unquantised activations."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Activation type of the dequantized mode. Left out: float32."""
    allow_config_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Unknown key of config.json that can't change results; may be repeated."""


@dataclass(frozen=True)
class Step:
    """What a draft step starts from: anchors [R] with their positions, context rows [N] and whose they are."""

    anchor_ids: Tensor
    anchor_positions: Tensor
    context_features: Tensor
    context_positions: Tensor
    context_request: Tensor


def tensor_names(stages: int) -> list[str]:
    """The names in the file, in the order of the computation."""
    return [
        *("anchor_ids", "context_features", "context_positions", "context_request", "anchor_positions", "positions"),
        "main_x",
        *(f"stage{s}_{name}" for s in range(stages) for name in STAGE_TENSORS),
        *("hidden_prenorm", "base_logits", "corrected_logits", "draft_tokens", "confidence"),
    ]


def read_prompt_ids(path: Path) -> list[list[int]]:
    """The requests of a prompt file, as ``--prompt-ids`` takes them."""
    text = read_text(path, "a file with token ids, one request a line")
    try:
        if text.lstrip().startswith("["):
            prompts = json.loads(text)
        else:
            lines = (re.split(r"[\s,]+", line.strip(" \t,")) for line in text.split("\n") if line.strip())
            prompts = [[int(word) for word in line if word] for line in lines]
        if not prompts or not all(p and all(type(t) is int for t in p) for p in prompts):
            raise ValueError("a request without tokens, or something that is not a token id")
    except (ValueError, TypeError) as error:
        raise DumpError(
            f"{path}: {error}; expected token ids, one request a line, or a JSON list of lists of integers"
        ) from None
    return prompts


def check_prompts(prompts: Sequence[Sequence[int]], config: TargetConfig, block: int) -> None:
    """Raise :class:`DumpError` for ids outside the vocabulary and prompts that leave no room for a block."""
    longest = config.max_position_embeddings - block
    problems = _count_problems(len(prompts)) if prompts else []
    for i, prompt in enumerate(prompts):
        if bad := [t for t in prompt if not 0 <= t < config.vocab_size]:
            problems.append(f"request {i} has token ids {bad[:5]}, expected 0..{config.vocab_size - 1}")
        if len(prompt) > longest:
            problems.append(f"request {i} has {len(prompt)} tokens, expected at most {longest}")
    if problems:
        raise DumpError("; ".join(problems))


def _count_problems(requests: int) -> list[str]:
    if 1 <= requests <= MAX_REQUESTS:
        return []
    return [f"there are {requests} requests, expected 1 to {MAX_REQUESTS}, which a draft step takes"]


def rings(network: Network) -> list[Tensor]:
    """A network's empty caches, in the order of its inputs."""
    names = set(network.io.aliases.values())
    return [torch.zeros(i.shape, dtype=i.dtype) for i in network.io.inputs if i.name in names]


def run_target(network: Network, prompts: Sequence[Sequence[int]], window: int) -> Step:
    """Run each prompt through the target, a window at a time."""
    caches, anchors, features = rings(network), [], []
    for request, prompt in enumerate(prompts):
        for start in range(0, len(prompt), window):
            ids = torch.tensor(prompt[start : start + window], dtype=torch.int32)
            positions = torch.arange(start, start + len(ids), dtype=torch.int32)
            logits, captured, *caches = network(ids, positions, torch.full_like(ids, request), *caches)
            features.append(captured)
        anchors.append(int(logits[-1].argmax()))
    lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
    return Step(
        anchor_ids=torch.tensor(anchors, dtype=torch.int32),
        anchor_positions=lengths,
        context_features=torch.cat(features),
        context_positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths.tolist()]),
        context_request=torch.repeat_interleave(lengths).to(torch.int32),
    )


def read_features(path: Path, config: DraftConfig, dtype: torch.dtype) -> Step:
    """The start of a step from a file; anchors stand right after the last row of their request."""
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise DumpError(
            f"{path}: not a safetensors file ({error}); write it with safetensors.torch.save_file"
        ) from None
    wanted = ("anchor_ids", "context_features", "context_positions", "context_request")
    if missing := [name for name in wanted if name not in found]:
        raise DumpError(f"{path}: {', '.join(missing)} missing; expected {', '.join(wanted)}")
    anchors, features, positions, request = (found[name] for name in wanted)
    width = config.num_features * config.hidden_size
    rows, count = list(features.shape[:1]), anchors.numel()
    problems = []
    if features.dim() != 2 or features.shape[1] != width:
        problems.append(f"context_features has shape {list(features.shape)}, expected [rows, {width}]")
    if not features.is_floating_point():
        problems.append(f"context_features is {_dtype(features)}, expected a floating-point type")
    if anchors.dim() != 1:
        problems.append(f"anchor_ids has shape {list(anchors.shape)}, expected [requests]")
    problems += [
        f"{name} has shape {list(t.shape)}, expected {rows or '[rows]'}"
        for name, t in (("context_positions", positions), ("context_request", request))
        if t.dim() != 1 or (rows and list(t.shape) != rows)
    ]
    problems += [
        f"{name} is {_dtype(found[name])}, expected int32 or int64"
        for name in ("anchor_ids", "context_positions", "context_request")
        if found[name].dtype not in (torch.int32, torch.int64)
    ]
    if not problems:
        problems = _value_problems(anchors, positions, request, config)
    if problems:
        raise DumpError(f"{path}: {'; '.join(problems)}. Write it again, for this checkpoint")
    anchors, positions, request = (t.to(torch.int32) for t in (anchors, positions, request))
    last = torch.zeros(count, dtype=torch.int32).scatter_reduce(0, request.long(), positions, "amax")
    return Step(anchors, last + 1, features.to(dtype), positions, request)


def _value_problems(anchors: Tensor, positions: Tensor, request: Tensor, config: DraftConfig) -> list[str]:
    """What is wrong with the numbers of features whose shapes are right."""
    problems, count = _count_problems(len(anchors)), len(anchors)
    if not bool(((anchors >= 0) & (anchors < config.vocab_size)).all()):
        problems.append(f"anchor_ids is {anchors.tolist()}, expected ids of 0..{config.vocab_size - 1}")
    # After the last row there is room for a block.
    limit = config.max_position_embeddings - config.block_rows
    if bad := positions[(positions < 0) | (positions >= limit)].tolist():
        problems.append(f"context_positions has {bad[:5]}, expected 0..{limit - 1}")
    if (named := sorted(set(request.tolist()))) != list(range(count)):
        problems.append(f"context_request names {named[:5]}, expected each of 0..{count - 1}")
    return problems


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def draft_step(network: Network, probes: Probes, step: Step) -> dict[str, Tensor]:
    """Run the draft once and return every tensor by name, in the order of :func:`tensor_names`."""
    config = network.model.config
    probes.clear()
    slots = torch.arange(len(step.anchor_ids), dtype=torch.int32)
    context = (step.context_features, step.context_positions, step.context_request)
    tokens, confidence, *_ = network(step.anchor_ids, step.anchor_positions, slots, *context, *rings(network))
    block = torch.arange(config.block_rows, dtype=torch.int32)
    found = {
        **vars(step),
        **probes,
        "positions": step.anchor_positions.unsqueeze(1) + block,
        "draft_tokens": tokens,
        "confidence": confidence,
    }
    return {name: found[name].contiguous().clone() for name in tensor_names(config.num_stages)}


@torch.inference_mode()
def dump(options: Options) -> dict[str, Tensor]:
    """Write ``options.output`` and return what it holds."""
    if (options.prompt_ids is None) == (options.features is None):
        given = "both" if options.features else "neither"
        raise DumpError(f"{given} of --prompt-ids and --features was given, expected one; pass either")
    if options.mode == "released" and options.dtype not in (None, "bfloat16"):
        raise DumpError(
            f"released numerics are bfloat16, --dtype is {options.dtype}; add --mode dequantized, or leave --dtype out"
        )
    if (ranks := launcher_ranks() or 1) > 1:
        raise DumpError(f"a launcher started {ranks} ranks, which would write the same file; start it without mpirun")
    check_output(options.output, "--output")
    prompts = read_prompt_ids(options.prompt_ids) if options.prompt_ids else []
    stages = count_stages(Checkpoint(options.checkpoint).files)
    target, draft = read_configs(options.checkpoint, num_stages=stages, allow_keys=options.allow_config_key)
    if prompts and any(target.compress_ratios):
        raise DumpError(
            f"{options.checkpoint}: its target has compressed attention, which this version does not run; "
            "pass --features with what the target gives instead of --prompt-ids"
        )
    check_prompts(prompts, target, draft.block_rows)
    dtype = "bfloat16" if options.mode == "released" else options.dtype or "float32"

    def build_for(requests: int) -> BuildConfig:
        return BuildConfig(numerics=Numerics(options.mode), dtype=dtype, max_batch_size=requests).checked(draft)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".dump_draft-") as scratch:
        shards = Path(scratch) / "shards"
        keys = options.allow_config_key
        convert_checkpoint(options.checkpoint, shards, tp_size=1, draft_only=not prompts, allow_keys=keys)
        if options.features:
            step = read_features(options.features, draft, getattr(torch, dtype))
        else:
            network = load_network("target", shards, 0, build_for(len(prompts)))
            step = run_target(network, prompts, target.sliding_window)
        probes = Probes(draft.block_rows)
        network = load_network("draft", shards, 0, build_for(len(step.anchor_ids)), probe=probes.record)
        tensors = draft_step(network, probes, step)
        facts = {"mode": options.mode, "dtype": dtype, "weights_hash": read_shard_config(shards).weights_hash}
    with writing(options.output):
        options.output.write_bytes(save(tensors, metadata=facts))  # save_file() lets nobody else read the file
    return tensors


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    try:
        tell(options, dump(options))
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (*USER_ERRORS, DumpError, LaunchError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def tell(options: Options, tensors: dict[str, Tensor]) -> None:
    """Print what was written."""
    table = Table("tensor", "dtype", "shape", "rms", title=str(options.output), title_justify="left")
    for name, tensor in tensors.items():
        rms = f"{tensor.double().square().mean().sqrt():.4g}" if tensor.is_floating_point() else ""
        table.add_row(name, _dtype(tensor), str(list(tensor.shape)), rms)
    Output().print(table)


if __name__ == "__main__":
    sys.exit(main())
