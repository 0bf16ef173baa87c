"""Random checkpoints in the released format, small enough to make in a second.

The names, dtypes and shapes below are written out once more from section 2 of the specification, not taken
from :mod:`dspark_trt.builder.checkpoint`, and the files are written by the safetensors library: what reads
them is tested against something else than itself.

    write_checkpoint(directory, tiny_config("v4.1"))
    write_checkpoint(directory, tiny_config("v4", num_hash_layers=2), seed=7)
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

STAGES = 3

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 128,
    "o_groups": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 32,
    "compress_ratios": [0] * 7,
    "compress_rope_theta": 160000,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 319,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}
_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 128,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,  # the released configurations say so, though three stages ship
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1},
}
_V41 = {
    "model_type": "deepseek_v41_text",
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "o_lora_rank": 64,
    "moe_intermediate_size": 128,
    "rms_norm_eps": 1e-20,
    "num_nextn_predict_layers": STAGES,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1},
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}


def tiny_config(variant: str, **overrides: Any) -> dict[str, Any]:
    """The ``config.json`` of a tiny checkpoint, laid out as the released ones of ``variant``.

    ``overrides`` replace keys of the language model, or ``weight_block_size``, one integer.
    """
    block = overrides.pop("weight_block_size", 128 if variant == "v4" else 32)
    quantization = {**_QUANTIZATION, "weight_block_size": [block, block]}
    if variant == "v4":
        return {**_COMMON, **_V4, "quantization_config": {**quantization, "fmt": "e4m3"}, **overrides}
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "quantization_config": {**quantization, "expert_dtype": "fp4"},
        "text_config": {**_COMMON, **_V41, **overrides},
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 2},
    }


def language_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The part of ``config`` that describes the language model and its draft."""
    return config.get("text_config", config)


class _Maker:
    """Random values that keep activations near one, a generator for each name."""

    def __init__(self, seed: int, block: int):
        self.seed, self.block = seed, block
        self.tensors: dict[str, Tensor] = {}

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.seed)

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        self.tensors[name] = (mean + std * torch.randn(shape, generator=self.generator(name))).to(dtype)

    def norm(self, name: str, size: int) -> None:
        self.normal(f"{name}.weight", size, mean=1.0, std=0.1, dtype=torch.bfloat16)

    def scales(self, name: str, rows: int, columns: int, fan_in: int, rms: float) -> None:
        """Powers of two around the one that gives weights a variance of 1 / fan_in."""
        exponent = round(-math.log2(math.sqrt(fan_in) * rms))
        bytes_ = 127 + exponent + torch.randint(-1, 2, (rows, columns), generator=self.generator(name))
        self.tensors[name] = bytes_.to(torch.uint8).view(torch.float8_e8m0fnu)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self.normal(f"{name}.weight", rows, columns, std=16.0, dtype=torch.float8_e4m3fn)
        block_rows, block_columns = -(-rows // self.block), -(-columns // self.block)
        self.scales(f"{name}.scale", block_rows, block_columns, columns, rms=16.0)

    def fp4(self, name: str, rows: int, columns: int) -> None:
        weight = f"{name}.weight"
        packed = torch.randint(-128, 128, (rows, columns // 2), generator=self.generator(weight))
        self.tensors[weight] = packed.to(torch.int8)
        self.scales(f"{name}.scale", rows, columns // 32, columns, rms=2.9)

    def layer(self, name: str, keys: dict[str, Any], experts: int, top_k: int, *, v41: bool, hashed: bool) -> None:
        hidden, heads, width = keys["hidden_size"], keys["num_attention_heads"], keys["head_dim"]
        q_rank, groups, inner = keys["q_lora_rank"], keys["o_groups"], keys["moe_intermediate_size"]
        out_rank = groups * keys["o_lora_rank"]
        self.normal(f"{name}.attn.attn_sink", heads, std=1.0)
        self.fp8(f"{name}.attn.wq_a", q_rank, hidden)
        self.norm(f"{name}.attn.q_norm", q_rank)
        self.fp8(f"{name}.attn.wq_b", heads * width, q_rank)
        self.fp8(f"{name}.attn.wkv", width, hidden)
        self.norm(f"{name}.attn.kv_norm", width)
        self.fp8(f"{name}.attn.wo_a", out_rank, heads * width // groups)
        self.fp8(f"{name}.attn.wo_b", hidden, out_rank)
        self.norm(f"{name}.attn_norm", hidden)
        self.norm(f"{name}.ffn_norm", hidden)
        self.normal(f"{name}.ffn.gate.weight", experts, hidden, std=hidden**-0.5, dtype=torch.bfloat16)
        if hashed:
            table = f"{name}.ffn.gate.tid2eid"
            order = torch.rand(keys["vocab_size"], experts, generator=self.generator(table)).argsort(-1)
            self.tensors[table] = order[:, :top_k].contiguous()
        else:
            self.normal(f"{name}.ffn.gate.bias", experts, std=0.1)
            if v41:
                self.normal(f"{name}.ffn.gate.bias_vl", experts, std=0.1)
        shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
        for matrix, shape in shapes.items():
            for expert in range(experts):
                self.fp4(f"{name}.ffn.experts.{expert}.{matrix}", *shape)
            self.fp8(f"{name}.ffn.shared_experts.{matrix}", *shape)
        for sublayer in ("attn", "ffn"):
            self.normal(f"{name}.hc_{sublayer}_fn", 24, 4 * hidden, std=(4 * hidden) ** -0.5)
            self.normal(f"{name}.hc_{sublayer}_base", 24, std=0.5)
            self.normal(f"{name}.hc_{sublayer}_scale", 3, mean=1.0, std=0.2)

    def head_collapse(self, prefix: str, hidden: int) -> None:
        self.normal(f"{prefix}hc_head_fn", 4, 4 * hidden, std=(4 * hidden) ** -0.5)
        self.normal(f"{prefix}hc_head_base", 4, std=0.5)
        self.normal(f"{prefix}hc_head_scale", 1, mean=1.0, std=0.2)


def random_tensors(
    config: dict[str, Any], *, seed: int = 0, stages: int = STAGES, target: bool = True
) -> dict[str, Tensor]:
    """Every released tensor of a checkpoint with this ``config``, by name; without ``target``, the draft's.

    A name's values depend on the name and the seed alone.
    """
    v41, keys = "text_config" in config, language_keys(config)
    hidden, vocab, rank = keys["hidden_size"], keys["vocab_size"], keys["dspark_markov_rank"]
    make = _Maker(seed, config["quantization_config"]["weight_block_size"][0])
    bf16 = torch.bfloat16
    make.normal("embed.weight", vocab, hidden, std=1.0, dtype=bf16)
    make.normal("head.weight", vocab, hidden, std=hidden**-0.5, dtype=bf16)
    experts, top_k = keys["n_routed_experts"], keys["num_experts_per_tok"]
    if target:
        for layer in range(keys["num_hidden_layers"]):
            hashed = layer < keys.get("num_hash_layers", 0)
            make.layer(f"layers.{layer}", keys, experts, top_k, v41=v41, hashed=hashed)
        make.norm("norm", hidden)
        if not v41:
            make.head_collapse("", hidden)
    if v41:
        experts, top_k = keys["dspark_n_routed_experts"], keys["dspark_num_experts_per_tok"]
    for stage in range(stages):
        make.layer(f"mtp.{stage}", keys, experts, top_k, v41=v41, hashed=False)
    make.fp8("mtp.0.main_proj", hidden, len(keys["dspark_target_layer_ids"]) * hidden)
    make.norm("mtp.0.main_norm", hidden)
    last = f"mtp.{stages - 1}"
    make.norm(f"{last}.norm", hidden)
    first, second = ("embed", "head") if v41 else ("markov_w1", "markov_w2")
    make.normal(f"{last}.markov_head.{first}.weight", vocab, rank, std=1.0, dtype=bf16)
    make.normal(f"{last}.markov_head.{second}.weight", vocab, rank, std=rank**-0.5, dtype=bf16)
    # A linear layer with a bias that reads the hidden row and one or two vectors of the rank.
    projections = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
    if kind := projections.get(keys.get("dspark_markov_head_type", "vanilla")):
        name, outputs, inputs = kind
        make.normal(f"{last}.markov_head.{name}.weight", outputs, inputs, std=inputs**-0.5, dtype=bf16)
        make.normal(f"{last}.markov_head.{name}.bias", outputs, std=0.5, dtype=bf16)
    width = hidden + rank
    make.normal(f"{last}.confidence_head.proj.weight", 1, width, std=width**-0.5, dtype=bf16)
    if not v41:
        make.head_collapse(f"{last}.", hidden)
    return make.tensors


def write_tensors(directory: Path, tensors: dict[str, Tensor], *, shards: int = 2) -> None:
    """Write ``tensors`` as ``shards`` safetensors files and their index, or as a single file for 1."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(directory, weight_map)


SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file whose data is a hole: zeros that take no space on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    """Write ``model.safetensors.index.json``."""
    values = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(values))


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    shards: int = 2,
    stages: int = STAGES,
    drop: Iterable[str] = (),
    replace: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Write a checkpoint with random weights to ``directory`` and return its tensors.

    Args:
        directory: created when it does not exist.
        config: from :func:`tiny_config`.
        seed: of the weights.
        shards: safetensors files to spread them over.
        stages: draft stages.
        drop: names to leave out.
        replace: tensors to put in place of the random ones, or beside them under new names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_tensors(config, seed=seed, stages=stages) | (replace or {})
    for name in drop:
        del tensors[name]
    write_tensors(directory, tensors, shards=shards)
    return tensors
