"""What the trained tiny models decode greedily on a CPU, in each numerics mode: what other executors are held to.

Recorded, because a GPU run should not spend its time on the CPU's; ``python -m tests.greedy_reference`` records
again, and a unit test decodes the first prompts anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dspark_trt.plugins import attention, numerics
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import Communicator
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.device import DeviceChoice
from dspark_trt.runtime_py.requests import Request, SamplingParams
from dspark_trt.runtime_py.verification import Verdict, Verifier
from torch import Tensor

from tests.example_scripts import CHECKPOINT
from tests.placeholder_engines import make_engines

FILE = Path(__file__).parent / "data" / "cpu_greedy.json"
MODES: dict[str, dict[str, Any]] = {
    "released": {"numerics": "released", "dtype": "bfloat16"},
    "float32": {"numerics": "dequantized", "dtype": "float32"},
}
PROMPTS, TOKENS, CONTEXT, FORCED = 20, 200, 24, 40
"""Prompts, tokens of each, bytes of a prompt, and how many of the tokens logits are compared at."""
QUANTILES = {"half": 0.5, "nine tenths": 0.9, "ninety-nine hundredths": 0.99}


def prompts() -> list[list[int]]:
    """Token ids (bytes behind the model's first token) of passages from the held-out text, all over it."""
    text = (CHECKPOINT.parent / "corpus" / "heldout.txt").read_bytes()
    stride = len(text) // PROMPTS
    return [[256, *text[i * stride : i * stride + CONTEXT]] for i in range(PROMPTS)]


def build_options(mode: str) -> dict[str, Any]:
    return {**MODES[mode], "max_batch_size": 8, "max_seq_len": 320}


def recorded(mode: str) -> list[list[int]]:
    """Tokens of each prompt."""
    found: list[list[int]] = json.loads(FILE.read_text())[mode]
    return found


def decode_on_cpu(engines: Path, count: int, tokens: int) -> list[list[int]]:
    """Greedy tokens of the first ``count`` prompts; target only, so that no draft has a say."""
    with Decoder.from_dir(engines, speculative=False, device="cpu") as decoder:
        done, _ = decoder.generate(prompts()[:count], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [completion.token_ids for completion in done]


@dataclass(frozen=True)
class ForcingVerifier(Verifier):
    """Makes requests emit given tokens, and keeps the logits that they would have been chosen from."""

    tokens: Sequence[Sequence[int]] = ()
    logits: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Of a request's index, a row for each token."""

    def __call__(self, requests: Sequence[Request], logits: Tensor, draft_logits: Tensor | None) -> Verdict:
        for request, row in zip(requests, logits, strict=True):
            self.logits[request.index].append(row.cpu().clone())
        return Verdict([0] * len(requests), [self.tokens[r.index][len(r.output)] for r in requests])


def forced_logits(
    engines: Path,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    device: DeviceChoice,
    backend: Backend = "torch",
    communicator: Communicator | None = None,
) -> Tensor:
    """The target's logits [P, T, V] float32 at every one of P times T given ``tokens`` behind P prompts."""
    verifier, count = ForcingVerifier(tokens=tokens), len(tokens[0])
    options = {"speculative": False, "device": device, "backend": backend}
    with Decoder.from_dir(engines, communicator=communicator, verifier=verifier, **options) as decoder:
        decoder.interleaver = None  # the host chooses
        decoder.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    return torch.stack([torch.stack(verifier.logits[index]) for index in range(len(tokens))])


def quantiles(difference: Tensor) -> dict[str, float]:
    """How far logits [P, T, V] lie from others: quantiles of the rms of a position, and the largest distance."""
    rms = difference.square().mean(-1).sqrt().flatten()
    found = dict(zip(QUANTILES, rms.quantile(torch.tensor(list(QUANTILES.values()))).tolist(), strict=True))
    return {name: float(f"{value:.3g}") for name, value in {**found, "largest": float(difference.abs().max())}.items()}


def distance_to_cpu(
    engines: Path, mode: str, device: DeviceChoice, communicator: Communicator | None = None
) -> dict[str, float]:
    """:func:`quantiles` of a device's logits against the CPU's, behind the first recorded tokens of every prompt."""
    tokens = [row[:FORCED] for row in recorded(mode)]
    views = [partial(forced_logits, engines, device=where, communicator=communicator) for where in ("cpu", device)]
    here, there = (view(prompts(), tokens) for view in views)
    return quantiles(there - here)


def recorded_spread(mode: str) -> dict[str, float]:
    """The same distance of a CPU that rounds elsewhere (:func:`other_rounding`)."""
    found: dict[str, float] = json.loads(FILE.read_text())["spread"][mode]
    return found


def measure_spread(engines: Path, tokens: Sequence[Sequence[int]]) -> dict[str, float]:
    here = forced_logits(engines, prompts()[: len(tokens)], tokens, "cpu")
    with other_rounding():
        return quantiles(forced_logits(engines, prompts()[: len(tokens)], tokens, "cpu") - here)


@contextmanager
def other_rounding() -> Iterator[None]:
    """Equal mathematics rounded elsewhere: matrix products summed from their other end and in float32, and the
    probabilities of attention rounded against the largest score of 16 keys instead of 64."""

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(x.float().flip(-1), weight.float().flip(-1).transpose(-1, -2))

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x, weight).to(x.dtype)

    forward = numerics.quantized_matmul

    def quantized_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor, *, group: int, block: int) -> Tensor:
        return forward(x.flip(-1), weight.flip(-1), weight_scale.flip(-1), group=group, block=block)

    replacements = {numerics.matmul: matmul, numerics.linear: linear, forward: quantized_matmul}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(attention, "KEY_BLOCK", 16))
        for module in [m for name, m in sys.modules.items() if name.startswith("dspark_trt.")]:
            for old, new in replacements.items():
                if getattr(module, old.__name__, None) is old:
                    patches.enter_context(mock.patch.object(module, old.__name__, new))
        yield


@dataclass(frozen=True)
class Divergence:
    """Where two decodes of a prompt part, and how the target sees the two tokens in either."""

    prompt: int
    position: int
    margin_cpu: float
    """Logit of the CPU's token, or whatever the other is held to, minus that of the other, there; not negative."""
    margin_other: float
    """The same on the other device; not positive."""

    @property
    def rounding(self) -> float:
        """By how much the two's logits differ in what decided."""
        return self.margin_cpu - self.margin_other


def divergences(
    engines: Path, mode: str, found: list[list[int]], device: DeviceChoice, communicator: Communicator | None = None
) -> list[Divergence]:
    """The first difference of every prompt whose tokens are not those recorded."""
    views = [partial(forced_logits, engines, device=where, communicator=communicator) for where in ("cpu", device)]
    return where_texts_part(found, recorded(mode), views)


def compare_texts(
    found: Sequence[list[int]],
    wanted: Sequence[list[int]],
    view_found: Callable[..., Tensor],
    view_wanted: Callable[..., Tensor],
) -> tuple[dict[str, float], list[Divergence]]:
    """How far the logits behind two decodes lie from each other (:func:`quantiles`), and where their texts part."""
    forced = [row[:FORCED] for row in wanted]
    distance = quantiles(view_found(prompts(), forced) - view_wanted(prompts(), forced))
    return distance, where_texts_part(found, wanted, (view_wanted, view_found))


def where_texts_part(
    found: Sequence[list[int]], wanted: Sequence[list[int]], views: Sequence[Callable[..., Tensor]]
) -> list[Divergence]:
    """The first difference of every prompt's tokens; ``views`` are :func:`forced_logits` of what gave the ``wanted``
    tokens and of what gave those ``found``."""
    different = []
    for index, (prompt, ours, theirs) in enumerate(zip(prompts(), found, wanted, strict=True)):
        if ours == theirs:
            continue
        position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        text = prompt + theirs[:position]
        rows = [logits([text], [[0]])[0, 0] for logits in views]
        different.append(
            Divergence(index, position, *(float(row[theirs[position]] - row[ours[position]]) for row in rows))
        )
    return different


def main() -> None:
    lines, spread = [], {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as root:
            engines = make_engines(Path(root), 1, **build_options(mode))
            found = decode_on_cpu(engines, PROMPTS, TOKENS)
            spread[mode] = measure_spread(engines, [row[:FORCED] for row in found])
        lines.append(f'"{mode}": [\n' + ",\n".join(map(json.dumps, found)) + "\n]")
    FILE.write_text("{\n" + ",\n".join([*lines, f'"spread": {json.dumps(spread)}']) + "\n}\n")


if __name__ == "__main__":
    main()
