"""The configuration of the trained tiny models, as config.json has it, and their texts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _common import read_text
from torch import Tensor

BOS, EOS, NOISE = 256, 257, 258

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
        "weight_block_size": [32, 32],
    },
    "text_config": {
        "vocab_size": 264,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_hash_layers": 0,
        "rms_norm_eps": 1e-20,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "sliding_window": 128,
        "rope_theta": 10000.0,
        "compress_ratios": [0, 0, 0, 0, 0, 0, 0],
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [1, 2, 3],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
}


def encode_corpus(path: Path) -> Tensor:
    """Paragraphs as BOS, bytes, EOS; one int64 vector."""
    paragraphs = [p for p in read_text(path, "a --corpus with train.txt and heldout.txt").split("\n") if p.strip()]
    return torch.tensor([t for p in paragraphs for t in (BOS, *p.encode(), EOS)], dtype=torch.int64)
