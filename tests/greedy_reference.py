"""What the trained tiny models decode greedily on a CPU, in each numerics mode: what other executors are held to.

Recorded, because a GPU run should not spend its time on the CPU's; ``python -m tests.greedy_reference`` records
again, and a unit test decodes the first prompts anew. One rank and two are recorded each: partial sums are rounded
once more than whole ones, so texts of two ranks are held to those that two ranks decode on a CPU. Where two texts
part, the logits of what decoded either say by how little: :func:`where_texts_part`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from dspark_trt.plugins import attention, numerics
from dspark_trt.runtime_py.backend import Backend
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from dspark_trt.runtime_py.decoder import Decoder
from dspark_trt.runtime_py.device import DeviceChoice
from dspark_trt.runtime_py.requests import Request, SamplingParams
from dspark_trt.runtime_py.verification import Verdict, Verifier
from torch import Tensor

from tests.example_scripts import CHECKPOINT
from tests.placeholder_engines import make_engines
from tests.thread_ranks import on_ranks

FILE = Path(__file__).parent / "data" / "cpu_greedy.json"
MODES: dict[str, dict[str, Any]] = {
    "released": {"numerics": "released", "dtype": "bfloat16"},
    "float32": {"numerics": "dequantized", "dtype": "float32"},
}
RANKS = (1, 2)
PROMPTS, TOKENS, CONTEXT, FORCED = 20, 200, 24, 40
"""Prompts, tokens of each, bytes of a prompt, and how many of the tokens logits are compared at."""
QUANTILES = {"half": 0.5, "nine tenths": 0.9, "ninety-nine hundredths": 0.99}


def prompts() -> list[list[int]]:
    """Token ids (bytes after the model's first token) of passages from the held-out text, all over it."""
    text = (CHECKPOINT.parent / "corpus" / "heldout.txt").read_bytes()
    stride = len(text) // PROMPTS
    return [[256, *text[i * stride : i * stride + CONTEXT]] for i in range(PROMPTS)]


def build_options(mode: str) -> dict[str, Any]:
    return {**MODES[mode], "max_batch_size": 8, "max_seq_len": 320}


def recorded(mode: str, ranks: int = 1) -> list[list[int]]:
    """Tokens of each prompt, as so many ranks decode them."""
    found: list[list[int]] = _recording(ranks)[mode]
    return found


def recorded_spread(mode: str, ranks: int = 1) -> dict[str, float]:
    """How far the logits of a CPU that rounds elsewhere (:func:`other_rounding`) lie from the CPU's."""
    found: dict[str, float] = _recording(ranks)["spread"][mode]
    return found


def _recording(ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())[str(ranks)]
    return found


def decode_on_cpu(engines: Path, ranks: int, count: int, tokens: int) -> list[list[int]]:
    """Greedy tokens of the first ``count`` prompts; target only, so that no draft has a say."""

    def decode(communicator: Communicator) -> list[list[int]]:
        with Decoder.from_dir(engines, speculative=False, device="cpu", communicator=communicator) as decoder:
            done, _ = decoder.generate(prompts()[:count], SamplingParams(max_tokens=tokens, ignore_eos=True))
        return [completion.token_ids for completion in done]

    return on_ranks(ranks, decode)[0]


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


@dataclass(frozen=True)
class View:
    """The target of an engine directory on a device; every rank of ``communicator`` asks it the same."""

    engines: Path
    device: DeviceChoice
    backend: Backend = "torch"
    communicator: Communicator = field(default_factory=SingleProcess)
    opening: Callable[[], AbstractContextManager[object]] = nullcontext
    """What the decoder is opened in."""

    def forced(self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [P, T, V] float32 at every one of P times T given ``tokens`` after P prompts, step by step."""
        verifier = ForcingVerifier(tokens=tokens)
        with self._decoder(verifier) as decoder:
            decoder.generate(prompts, SamplingParams(max_tokens=len(tokens[0]), ignore_eos=True))
        return torch.stack([torch.stack(verifier.logits[index]) for index in range(len(tokens))])

    def after(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [P, V] float32 after the last token of each text, which goes through alone."""
        verifier = ForcingVerifier(tokens=[[0]])
        with self._decoder(verifier) as decoder:
            for text in texts:
                decoder.generate([text], SamplingParams(max_tokens=1, ignore_eos=True))
        return torch.stack(verifier.logits[0])

    def _decoder(self, verifier: Verifier) -> Decoder:
        options: dict[str, Any] = {"device": self.device, "backend": self.backend, "communicator": self.communicator}
        # The host chooses, so nothing is captured.
        with self.opening():
            decoder = Decoder.from_dir(self.engines, speculative=False, verifier=verifier, request_counts=(), **options)
        decoder.interleaver = None
        return decoder


def quantiles(difference: Tensor) -> dict[str, float]:
    """How far logits [P, T, V] lie from others: quantiles of the rms of a position, and the largest distance."""
    rms = difference.square().mean(-1).sqrt().flatten()
    found = dict(zip(QUANTILES, rms.quantile(torch.tensor(list(QUANTILES.values()))).tolist(), strict=True))
    return {name: float(f"{value:.3g}") for name, value in {**found, "largest": float(difference.abs().max())}.items()}


def measure_spread(engines: Path, ranks: int, tokens: Sequence[Sequence[int]]) -> dict[str, float]:
    def forced(communicator: Communicator) -> Tensor:
        return View(engines, "cpu", communicator=communicator).forced(prompts()[: len(tokens)], tokens)

    here = on_ranks(ranks, forced)[0]
    with other_rounding():
        return quantiles(on_ranks(ranks, forced)[0] - here)


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


class ViewError(RuntimeError):
    """Logits are not of what decoded the texts that they are to explain."""


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


class Logits(Protocol):
    """What :func:`where_texts_part` asks of a :class:`View`."""

    def after(self, texts: Sequence[Sequence[int]]) -> Tensor: ...


def compare_with_cpu(
    view: View, mode: str, found: Sequence[Sequence[int]]
) -> tuple[dict[str, float], list[Divergence]]:
    """:func:`compare_texts` of the texts that a view's device decoded with the recorded ones of as many ranks."""
    ranks = view.communicator.size
    # Released numerics sum exactly on a CPU; in float32 sums depend on the rows beside theirs, and a margin is of two.
    tie = {"released": 0.0, "float32": 2 * recorded_spread(mode, ranks)["largest"]}[mode]
    cpu = View(view.engines, "cpu", communicator=view.communicator)
    return compare_texts(found, recorded(mode, ranks), view, cpu, tie)


def check_against_cpu(mode: str, ranks: int, distance: dict[str, float], parted: Sequence[Divergence]) -> None:
    """Assert that a device decoded what as many ranks of a CPU do, given what :func:`compare_with_cpu` found.

    In float32 all texts are equal, or nearly tied where one is not. Released weights round activations to 4 bits after
    every layer, and one flipped code can turn an expert: logits are then no farther from the CPU's than those of a CPU
    that rounds attention against other maxima, at every quantile (a quarter more for the noise of 800 positions), and
    no two tokens that part the texts farther than its farthest logits.
    """
    spread = recorded_spread(mode, ranks)
    print(f"{mode}, {ranks} rank(s): {PROMPTS - len(parted)} of {PROMPTS} prompts are identical; {parted}")
    print(f"{mode}: distance from the CPU {distance}; of a CPU that rounds elsewhere {spread}")
    for divergence in parted:
        assert divergence.rounding < {"float32": 1e-3, "released": 2 * spread["largest"]}[mode], divergence
    assert len(parted) <= {"float32": 1, "released": PROMPTS}[mode], parted
    for name in QUANTILES:
        assert distance[name] <= {"float32": 4, "released": 1.25}[mode] * spread[name], name


def compare_texts(
    found: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    view_found: View,
    view_wanted: View,
    tie: float | None = None,
) -> tuple[dict[str, float], list[Divergence]]:
    """How far the logits after two decodes lie from each other (:func:`quantiles`), and where their texts part.

    Args:
        tie: as of :func:`where_texts_part`; left out, what all but a hundredth of the positions stay below: an
            executor whose sums depend on the rows of a call rounds no better between its own calls.
    """
    forced = [row[:FORCED] for row in wanted]
    distance = quantiles(view_found.forced(prompts(), forced) - view_wanted.forced(prompts(), forced))
    tie = distance["ninety-nine hundredths"] if tie is None else tie
    return distance, where_texts_part(found, wanted, (view_wanted, view_found), tie)


def where_texts_part(
    found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], views: Sequence[Logits], tie: float = 0.0
) -> list[Divergence]:
    """The first difference of every prompt's tokens.

    Args:
        views: of what gave the ``wanted`` tokens and of what gave those ``found``.
        tie: the largest margin whose sign a view may have wrong. A view runs other rows together than the decode did.

    Raises:
        ViewError: naming every text that a view would not have decoded.
    """
    parted = []
    for index, (prompt, ours, theirs) in enumerate(zip(prompts(), found, wanted, strict=True)):
        if ours != theirs:
            position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            parted.append((index, position, [*prompt, *theirs[:position]], theirs[position], ours[position]))
    if not parted:
        return []
    rows = zip(*(view.after([text for _, _, text, _, _ in parted]) for view in views), strict=True)
    different = [
        Divergence(index, position, *(float(row[wanted_token] - row[found_token]) for row in pair))
        for (index, position, _, wanted_token, found_token), pair in zip(parted, rows, strict=True)
    ]
    if wrong := [d for d in different if d.margin_cpu < -tie or d.margin_other > tie]:
        raise ViewError(
            f"of {len(different)} texts that part, {len(wrong)} would not have been decoded by what their logits are "
            f"asked of, by more than a tie of {tie:.2g}: {wrong}; ask the engines, device and number of ranks that "
            "decoded each text"
        )
    return different


def main() -> None:
    recordings = []
    for ranks in RANKS:
        lines, spread = [], {}
        for mode in MODES:
            with tempfile.TemporaryDirectory() as root:
                engines = make_engines(Path(root), ranks, **build_options(mode))
                found = decode_on_cpu(engines, ranks, PROMPTS, TOKENS)
                spread[mode] = measure_spread(engines, ranks, [row[:FORCED] for row in found])
            lines.append(f'"{mode}": [\n' + ",\n".join(map(json.dumps, found)) + "\n]")
        recordings.append(f'"{ranks}": {{\n' + ",\n".join([*lines, f'"spread": {json.dumps(spread)}']) + "\n}")
    FILE.write_text("{\n" + ",\n".join(recordings) + "\n}\n")


if __name__ == "__main__":
    main()
