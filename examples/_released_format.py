"""Writes trained tiny models in the released checkpoint format.

Dense weights become FP8 e4m3 in 32 x 32 blocks, expert weights FP4 e2m1 with one scale per 32 channels
along K, scales are E8M0. :class:`FakeQuantized` applies the same rounding while a weight trains, so the
checkpoint holds what was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dspark_trt.plugins.numerics import pow2_ceil
from dspark_trt.runtime_py.output_files import writing
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils import parametrize

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|noise|>")
"""Their ids follow the 256 bytes."""


def quantize(weight: Tensor, block: tuple[int, int], largest: float) -> tuple[Tensor, Tensor]:
    """Weight divided by its power-of-two block scales, and the scales [..., N / bn, K / bk]."""
    rows, columns = weight.shape[-2:]
    blocks = weight.unflatten(-1, (columns // block[1], block[1])).unflatten(-3, (rows // block[0], block[0]))
    scale = pow2_ceil(blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-8) / largest)
    return (blocks / scale).flatten(-2).flatten(-3, -2), scale.squeeze(-1).squeeze(-2)


def round_fp4(codes: Tensor) -> Tensor:
    """Nearest FP4 e2m1 value; ties to the even code."""
    magnitude = codes.abs().clamp_max(6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, codes)


class FakeQuantized(nn.Module):
    """Rounds a weight as the checkpoint will store it; the gradient passes unchanged."""

    def __init__(self, block: tuple[int, int], fp4: bool):
        super().__init__()
        self.block, self.fp4 = block, fp4

    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scale = quantize(weight, self.block, 6.0 if self.fp4 else 448.0)
        return round_fp4(scaled) if self.fp4 else scaled.to(torch.float8_e4m3fn).float(), scale

    def forward(self, weight: Tensor) -> Tensor:
        codes, scale = self.codes(weight.detach())
        wide = scale.repeat_interleave(self.block[0], -2).repeat_interleave(self.block[1], -1)
        return weight + (codes * wide - weight).detach()


def released_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under the released names, in the released dtypes."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if parametrize.is_parametrized(module):
            quantizer = module.parametrizations["weight"][0]
            codes, scale = quantizer.codes(module.parametrizations["weight"].original.detach().cpu())
            exponents = scale.to(torch.float8_e8m0fnu)
            if not quantizer.fp4:
                tensors |= {f"{prefix}.weight": codes.to(torch.float8_e4m3fn), f"{prefix}.scale": exponents}
                continue
            parent, _, name = prefix.rpartition(".")
            nibbles = encode_fp4(codes)
            packed = (nibbles[..., ::2] | (nibbles[..., 1::2] << 4)).view(torch.int8)
            for e in range(codes.shape[0]):
                tensors[f"{parent}.{e}.{name}.weight"] = packed[e].contiguous()
                tensors[f"{parent}.{e}.{name}.scale"] = exponents[e].contiguous()
        elif "parametrizations" not in prefix:
            for name, p in module.named_parameters(recurse=False):
                wide = name in ("attn_sink", "bias") or name.startswith("hc_")
                tensors[f"{prefix}.{name}".lstrip(".")] = p.detach().cpu().to(torch.float32 if wide else torch.bfloat16)
                if name == "bias":  # V4.1 ships a second bias for image tokens
                    tensors[f"{prefix}.bias_vl"] = torch.zeros(p.shape)
    return tensors


def encode_fp4(codes: Tensor) -> Tensor:
    """The 4-bit codes of FP4 values, uint8."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.bucketize(codes.abs(), values).to(torch.uint8) | (torch.signbit(codes).to(torch.uint8) << 3)


def save_checkpoint(output: Path, config: dict[str, Any], target: nn.Module, draft: nn.Module) -> str:
    """Write config.json, tokenizer.json, two shards and their index; the draft shares embedding and head.

    Returns:
        what was written, as a line. OutputError if a file can't be.
    """

    def write(name: str, content: bytes) -> None:
        with writing(output / name):
            (output / name).write_bytes(content)

    shards = {
        "model-00001-of-00002.safetensors": released_tensors(target),
        "model-00002-of-00002.safetensors": {k: v for k, v in released_tensors(draft).items() if k.startswith("mtp.")},
    }
    for name, tensors in shards.items():
        write(name, save(tensors, metadata={"format": "pt"}))
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    weight_map = {k: name for name, tensors in shards.items() for k in sorted(tensors)}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write("model.safetensors.index.json", (json.dumps(index, indent=1) + "\n").encode())
    write("config.json", (json.dumps(config, indent=2) + "\n").encode())

    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    write("tokenizer.json", tokenizer.to_str(pretty=True).encode())
    return f"{output}: {total / 1e6:.2f} MB, {len(weight_map)} tensors"


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
