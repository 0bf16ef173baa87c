"""What the trained tiny models decode greedily on a CPU, in each numerics mode: what other executors are held to.

Recorded, because a GPU run should not spend its time on the CPU's; ``python -m tests.greedy_reference`` records
again, and a unit test decodes the first prompts anew.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
PROMPTS, TOKENS, CONTEXT = 20, 200, 24
"""Prompts, tokens of each, and bytes of a prompt."""


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


def decode_on_cpu(root: Path, mode: str, count: int, tokens: int) -> list[list[int]]:
    """Greedy tokens of the first ``count`` prompts; target only, so that no draft has a say."""
    with Decoder.from_dir(make_engines(root, 1, **build_options(mode)), speculative=False, device="cpu") as decoder:
        done, _ = decoder.generate(prompts()[:count], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [completion.token_ids for completion in done]


class RecordingVerifier(Verifier):
    """Keeps the logits that it last saw."""

    def __call__(self, requests: Sequence[Request], logits: Tensor, draft_logits: Tensor | None) -> Verdict:
        object.__setattr__(self, "logits", logits)  # a Verifier is frozen
        return super().__call__(requests, logits, draft_logits)


def next_logits(engines: Path, tokens: list[int], device: DeviceChoice) -> Tensor:
    """The target's logits [V] float32 behind ``tokens``."""
    verifier = RecordingVerifier()
    with Decoder.from_dir(engines, speculative=False, device=device, verifier=verifier) as decoder:
        decoder.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
    return verifier.logits[-1]  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class Divergence:
    """Where two decodes of a prompt part, and how the target sees the two tokens on either device."""

    prompt: int
    position: int
    margin_cpu: float
    """Logit of the CPU's token minus that of the other, on the CPU; not negative."""
    margin_other: float
    """The same on the other device; not positive."""

    @property
    def rounding(self) -> float:
        """By how much the devices' logits differ in what decided."""
        return self.margin_cpu - self.margin_other


def divergences(engines: Path, mode: str, found: list[list[int]], device: DeviceChoice) -> list[Divergence]:
    """The first difference of every prompt whose tokens are not those recorded."""
    different = []
    for index, (prompt, ours, wanted) in enumerate(zip(prompts(), found, recorded(mode), strict=True)):
        if ours == wanted:
            continue
        position = next(i for i, (a, b) in enumerate(zip(ours, wanted, strict=True)) if a != b)
        text = prompt + wanted[:position]
        margins = [
            float(logits[wanted[position]] - logits[ours[position]])
            for logits in (next_logits(engines, text, "cpu"), next_logits(engines, text, device))
        ]
        different.append(Divergence(index, position, *margins))
    return different


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        found = {mode: decode_on_cpu(Path(root), mode, PROMPTS, TOKENS) for mode in MODES}
    lines = [f'"{mode}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for mode, rows in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
