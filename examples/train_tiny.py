"""Trains the tiny V4.1-style target and its DSpark draft, and writes them in the released format.

Byte-level, four target layers and three draft stages, on public-domain novels (``examples/tiny/corpus``).
The target learns to predict the next byte. Then it is frozen and the draft learns, for blocks of five
bytes after random anchors, the target's own distributions: total variation (what sampling would
reject) and cross-entropy to the target's choice (what greedy decoding would reject), earlier positions
weighing more; the confidence head learns one minus the total variation.

Weights are rounded to FP8 (32 x 32 blocks) and FP4 (32 along K) in every forward pass, with gradients
passed straight through, so the checkpoint holds exactly what was trained. Takes a GPU a few
minutes, and a CPU many hours::

    python examples/train_tiny.py --output examples/tiny/checkpoint
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from _common import Output, check_output, device_name
from _released_format import FakeQuantized, save_checkpoint
from _tiny_config import CONFIG, encode_corpus
from dspark_trt.builder.config import Numerics, parse_configs
from dspark_trt.builder.model.attention import DraftBlockAttention, LatentAttention
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.draft import DraftModel
from dspark_trt.builder.model.hyper_connections import StreamChain, collapse_head, logits
from dspark_trt.builder.model.layers import Fp8Linear
from dspark_trt.builder.model.moe import ExpertWeights, Gate
from dspark_trt.builder.model.target import TargetModel
from dspark_trt.plugins.numerics import FP4_BLOCK, apply_rope, rope_tables
from dspark_trt.runtime_py.output_files import OutputError
from dspark_trt.runtime_py.requests import RequestError
from torch import Tensor, nn
from torch.nn.utils import parametrize

HERE = Path(__file__).parent / "tiny"
FIRST_ANCHOR = 8
"""Bytes at the start of a sequence behind which no draft block is trained."""


class TrainingError(RuntimeError):
    """The training failed; nothing was written."""


@dataclass(frozen=True)
class TrainConfig:
    """Train the tiny target and its draft, and write them in the released format."""

    output: Annotated[Path, tyro.conf.arg(help_behavior_hint="(default: examples/tiny/checkpoint)")] = (
        HERE / "checkpoint"
    )
    """Directory of the released-format checkpoint; files there are overwritten, by default those of the repository."""
    corpus: Annotated[Path, tyro.conf.arg(help_behavior_hint="(default: examples/tiny/corpus)")] = HERE / "corpus"
    """Directory with train.txt and heldout.txt."""
    target_steps: int = 2200
    """Optimiser steps of the target."""
    draft_steps: int = 3000
    """Optimiser steps of the draft, after the target's."""
    batch_size: int = 32
    """Sequences per step."""
    sequence_length: int = 512
    """Bytes of a sequence."""
    anchors: int = 32
    """Draft blocks per sequence."""
    learning_rate: float = 2e-3
    """The largest, between warm-up and decay."""
    seed: int = 0
    """Of the first weights and of the batches."""
    device: str | None = None
    """Where torch trains, such as cuda:1 or cpu. Left out: cuda if there is a GPU, or else cpu."""

    def checked(self, texts: dict[str, Tensor]) -> TrainConfig:
        """The options with a device; RequestError lists those that ``texts``, the model or the machine can't serve."""
        block, positions = (CONFIG["text_config"][k] for k in ("dspark_block_size", "max_position_embeddings"))
        least, most = FIRST_ANCHOR + block + 1, min(positions, *(len(text) - 2 for text in texts.values()))
        length = min(max(self.sequence_length, least), most)
        ranges = {
            "target_steps": (1, 10**9, "steps"),
            "draft_steps": (1, 10**9, "steps"),
            "sequence_length": (least, most, "what a draft block needs and the texts have"),
            "batch_size": (1, len(texts["train"]) // max(length, 1), "sequences in the training text"),
            "anchors": (1, length - least + 1, "places for a draft block in a sequence"),
            "seed": (0, 2**64 - 1, "64 bits"),
        }
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}, expected {low} to {high} ({what})"
            for name, (low, high, what) in ranges.items()
            if not low <= getattr(self, name) <= high
        ]
        if not 0 < self.learning_rate < math.inf:
            problems.append(f"--learning-rate is {self.learning_rate}, expected a number above 0")
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        devices = ["cuda", *gpus, "cpu"] if gpus else ["cpu"]
        if self.device not in (None, *devices):
            problems.append(f"--device is {self.device}, expected one that torch finds here ({', '.join(devices)})")
        if problems:
            raise RequestError(f"{'; '.join(problems)}. Pass others, or leave them out")
        return dataclasses.replace(self, device=self.device or devices[0])


def prepare(model: nn.Module, generator: torch.Generator) -> None:
    """Initialise ``model`` and make its stored-quantised weights round themselves."""
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith("gate.bias"))
        if "norm" in name and p.dim() == 1:
            p.data.fill_(1.0)
        elif name.endswith(("gate.bias", "attn_sink", "hc_head_base")):
            p.data.zero_()
        elif name.endswith("_scale"):
            p.data.fill_(1.0)
        elif name.endswith("_base"):
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
            p.data[8:] += 4 * torch.eye(4).flatten()  # streams mostly keep to themselves at first
        elif name.startswith(("embed", "head")) or "markov_head" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * (1.0 if "embed" in name else 0.02))
        else:
            p.data.copy_(torch.randn(p.shape, generator=generator) * (0.01 if "_fn" in name else p.shape[-1] ** -0.5))
    for module in list(model.modules()):
        if isinstance(module, Fp8Linear):
            parametrize.register_parametrization(module, "weight", FakeQuantized((32, 32), fp4=False))
        elif isinstance(module, ExpertWeights):
            parametrize.register_parametrization(module, "weight", FakeQuantized((1, FP4_BLOCK), fp4=True))
        elif isinstance(module, LatentAttention):
            parametrize.register_parametrization(module.wo_a, "weight", FakeQuantized((32, 32), fp4=False))
        elif isinstance(module, Gate):
            module.register_forward_hook(balance_experts)


@torch.no_grad()
def balance_experts(gate: Gate, _: Any, output: tuple[Tensor, Tensor]) -> None:
    """Nudge the selection bias towards equal use of the experts (training only)."""
    if not torch.is_grad_enabled() and not gate.training:
        return
    ids = torch.arange(gate.bias.numel(), device=gate.bias.device)
    load = (output[0].unsqueeze(-1) == ids).float().sum((0, 1))
    gate.bias.add_(1e-3 * (load.mean() - load).sign())


# --------------------------------------------------------------------------------- training forward


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """Dense sink attention; q [b, n, h, D], keys [b, k, D], valid [b, n, k] -> [b, n, h, D]."""
    scores = torch.einsum("bnhd,bkd->bhnk", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    sinks = sink[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhnk,bkd->bnhd", p, keys)


def train_window_attention(attn: LatentAttention, batch: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The target's attention over whole sequences, without a ring; same arithmetic, dense and fast."""

    def forward(x: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(positions, attn.config.qk_rope_head_dim, attn.config.rope_theta)
        q = apply_rope(attn.query(x), cos.unsqueeze(1), sin.unsqueeze(1)).unflatten(0, (batch, -1))
        keys = apply_rope(attn.key_value(x), cos, sin).unflatten(0, (batch, -1))
        index = torch.arange(q.shape[1], device=x.device)
        distance = index[:, None] - index
        valid = ((distance >= 0) & (distance < attn.config.sliding_window)).expand(batch, -1, -1)
        out = attend(q, keys, valid, attn.attn_sink).flatten(0, 1)
        return attn.output(apply_rope(out, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True)), ring

    return forward


def train_block_attention(attn: DraftBlockAttention, x: Tensor, main_x: Tensor, anchors: Tensor) -> Tensor:
    """x [b * a * B, H] blocks after ``anchors`` [b, a], main_x [b, L, H] -> [b * a * B, H]."""
    batch, count = anchors.shape
    block, length = attn.config.block_size, main_x.shape[1]
    dims, theta = attn.config.qk_rope_head_dim, attn.config.rope_theta
    context_positions = torch.arange(length, device=x.device)
    context = apply_rope(attn.key_value(main_x), *rope_tables(context_positions, dims, theta))
    positions = anchors.unsqueeze(-1) + torch.arange(block, device=x.device)
    cos, sin = rope_tables(positions.flatten(1), dims, theta)
    own = apply_rope(attn.key_value(x).unflatten(0, (batch, -1)), cos, sin)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    q = apply_rope(attn.query(x).unflatten(0, (batch, -1)), cos, sin)
    start = anchors.unsqueeze(-1)
    in_window = (context_positions < start) & (context_positions >= start - attn.config.sliding_window)
    same_block = torch.eye(count, dtype=torch.bool, device=x.device).repeat_interleave(block, 0)
    same_block = same_block.repeat_interleave(block, 1).expand(batch, -1, -1)
    valid = torch.cat((in_window.repeat_interleave(block, 1), same_block), -1)
    out = attend(q, torch.cat((context, own), 1), valid, attn.attn_sink)
    return attn.output(apply_rope(out, cos, sin, inverse=True).flatten(0, 1))


def draft_forward(model: DraftModel, tokens: Tensor, features: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Corrected logits [b, a, B, V] with the true previous tokens, and confidence [b, a, B]."""
    config = model.config
    first, last = model.mtp[0], model.mtp[-1]
    block = config.block_size
    main_x = first.main_x(features).unflatten(0, (*tokens.shape[:1], -1))
    ids = torch.full((*anchors.shape, block), config.noise_token_id, device=tokens.device)
    ids[..., 0] = tokens.gather(1, anchors)
    ids = ids.flatten()
    chain = StreamChain(config, model.context, ())
    state, partial = None, model.embed.weight[ids]
    for stage in model.mtp:
        sublayer = stage.sublayer("attn")
        state, x = chain.enter(partial, sublayer) if state is None else chain.cross(state, partial, sublayer)
        partial = train_block_attention(stage.attn, x, main_x, anchors)
        state, x = chain.cross(state, partial, stage.sublayer("ffn"))
        partial = stage.ffn(x, ids)
    hidden = collapse_head(last, chain.leave(state, partial), config).unflatten(0, (*anchors.shape, block))
    previous = tokens.gather(1, (anchors.unsqueeze(-1) + torch.arange(block, device=tokens.device)).flatten(1))
    embedded = last.markov_head.embed.weight[previous].unflatten(1, (-1, block))
    base = logits(hidden.flatten(0, 2), last.norm, model.head.weight).unflatten(0, hidden.shape[:3])
    return base + embedded @ last.markov_head.head.weight.t(), last.confidence_head(hidden, embedded)


def draft_loss(drafted: Tensor, confidence: Tensor, taught: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and per position the share of argmax agreement and the mean total variation."""
    p = taught.softmax(-1)
    variation = 0.5 * (drafted.softmax(-1) - p).abs().sum(-1)
    choice = taught.argmax(-1)
    entropy = F.cross_entropy(drafted.flatten(0, -2), choice.flatten(), reduction="none").view_as(variation)
    certainty = F.binary_cross_entropy_with_logits(confidence, 1 - variation.detach(), reduction="none")
    weight = torch.exp(-torch.arange(drafted.shape[-2], device=drafted.device) / 4.0)
    loss = ((0.9 * variation + 0.3 * entropy + 0.2 * certainty) * weight).mean()
    return loss, (drafted.argmax(-1) == choice).float().mean((0, 1)), variation.mean((0, 1))


# -------------------------------------------------------------------------------------------- loop


def finite(loss: Tensor, step: int) -> float:
    """The number, or TrainingError: the models are no good then."""
    if not math.isfinite(value := float(loss)):
        raise TrainingError(
            f"the loss is {value} after {step} steps, expected a finite number; nothing was written, lower "
            "--learning-rate"
        )
    return value


class Trainer:
    """AdamW with a cosine schedule; a step is captured once as a CUDA graph and replayed."""

    def __init__(self, parameters: list[nn.Parameter], step: Callable[[], Tensor], config: TrainConfig, steps: int):
        self.step, self.steps, self.config = step, steps, config
        self.rate = torch.zeros((), device=config.device)
        decayed = [p for p in parameters if p.dim() > 1]
        plain = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        cuda = config.device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), capturable=cuda, foreach=cuda)
        self.parameters = parameters

    def _update(self) -> Tensor:
        loss = self.step()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def run(self, load_batch: Callable[[], None], report: Callable[[int, float], None]) -> None:
        if self.config.device == "cuda":  # warm-up and capture must share a stream that isn't the default
            with torch.cuda.stream(torch.cuda.Stream()):
                self._run(load_batch, report)
            torch.cuda.synchronize()
        else:
            self._run(load_batch, report)

    def _run(self, load_batch: Callable[[], None], report: Callable[[int, float], None]) -> None:
        replay: Callable[[], Tensor] = self._update
        for i in range(self.steps):
            warm = min(1.0, (i + 1) / 200)
            self.rate.fill_(self.config.learning_rate * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * i / self.steps))))
            load_batch()
            if i == 3 and self.config.device == "cuda":
                replay = self._capture()
            loss = replay()
            if i % 500 == 0 or i == self.steps - 1:
                report(i, finite(loss, i))

    def _capture(self) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            loss = self._update()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


def train(config: TrainConfig) -> None:
    """Train and write; RequestError before any work, TrainingError and OutputError after it."""
    check_output(config.output, "--output", directory=True)
    texts = {name: encode_corpus(config.corpus / f"{name}.txt") for name in ("train", "heldout")}
    config = config.checked(texts)
    console = Output(soft_wrap=True)
    console.print(f"training on {device_name(torch.device(str(config.device)))}")
    torch.backends.cuda.matmul.allow_tf32 = True
    target_config, draft_config = parse_configs(CONFIG)
    context = BuildContext(Numerics.DEQUANTIZED, torch.float32)
    generator = torch.Generator().manual_seed(config.seed)
    target, draft = TargetModel(target_config, context), DraftModel(draft_config, context)
    prepare(target, generator)
    prepare(draft, generator)
    target.to(config.device)
    draft.to(config.device)
    shape = (config.batch_size, config.sequence_length)
    for layer in target.layers:
        layer.attn.forward = train_window_attention(layer.attn, config.batch_size)

    texts = {name: text.to(config.device) for name, text in texts.items()}
    tokens = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64, device=config.device)
    positions = torch.arange(shape[1], device=config.device).repeat(shape[0])
    slots = torch.zeros_like(positions)
    rings = [torch.zeros(1, 1, target_config.head_dim, device=config.device)] * target_config.num_hidden_layers

    def load_batch(name: str = "train") -> None:
        text = texts[name]
        starts = torch.randint(0, text.numel() - shape[1] - 1, (shape[0], 1), device=config.device)
        tokens.copy_(text[starts + torch.arange(shape[1] + 1, device=config.device)])

    def run_target() -> tuple[Tensor, Tensor]:
        out, features, _ = target(tokens[:, :-1].flatten(), positions, slots, rings)
        return out, features

    def target_step() -> Tensor:
        return F.cross_entropy(run_target()[0], tokens[:, 1:].flatten())

    started = time.monotonic()

    def report_target(i: int, loss: float) -> None:
        with torch.no_grad():
            target.eval()
            load_batch("heldout")
            held_out = finite(target_step(), i + 1)
            target.train()
        console.print(f"target {i:5d} loss {loss:.4f} held-out {held_out:.4f} {time.monotonic() - started:.0f} s")

    learned = [p for p in target.parameters() if p.requires_grad]
    Trainer(learned, target_step, config, config.target_steps).run(load_batch, report_target)

    target.requires_grad_(False)
    target.eval()
    draft.embed, draft.head = target.embed, target.head
    anchors = torch.zeros(shape[0], config.anchors, dtype=torch.int64, device=config.device)
    agreement = torch.zeros(2, draft_config.block_size, device=config.device)

    def load_draft_batch() -> None:
        load_batch()
        anchors.random_(FIRST_ANCHOR, shape[1] - draft_config.block_size)

    def draft_step() -> Tensor:
        with torch.no_grad():
            out, features = run_target()
        taught = out.unflatten(0, shape)
        rows = (anchors.unsqueeze(-1) + torch.arange(draft_config.block_size, device=config.device)).flatten(1)
        taught = taught.gather(1, rows.unsqueeze(-1).expand(-1, -1, taught.shape[-1]))
        drafted, confidence = draft_forward(draft, tokens[:, :-1], features, anchors)
        loss, agreed, variation = draft_loss(drafted, confidence, taught.unflatten(1, (config.anchors, -1)))
        agreement.copy_(torch.stack((agreed, variation)).detach())
        return loss

    def report_draft(i: int, loss: float) -> None:
        draft.eval()
        load_batch("heldout")
        with torch.no_grad():
            finite(draft_step(), i + 1)
        draft.train()
        agreed, variation = ([round(v, 3) for v in row] for row in agreement.tolist())
        elapsed = f"{time.monotonic() - started:.0f} s"
        console.print(f"draft {i:5d} loss {loss:.4f} held-out agreement {agreed} variation {variation} {elapsed}")

    learned = [p for p in draft.mtp.parameters() if p.requires_grad]
    Trainer(learned, draft_step, config, config.draft_steps).run(load_draft_batch, report_draft)
    console.print(save_checkpoint(config.output, CONFIG, target, draft))


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        train(tyro.cli(TrainConfig, args=arguments, description=__doc__))
        return 0
    except (RequestError, TrainingError, OutputError, torch.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1


if __name__ == "__main__":
    sys.exit(main())
