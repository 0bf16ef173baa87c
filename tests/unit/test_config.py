"""Reading released configurations: values, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder.config import (
    ConfigError,
    DraftConfig,
    TargetConfig,
    Variant,
    check_draft_length,
    from_dict,
    parse_configs,
    read_configs,
    to_dict,
)

from tests.released import language_keys, tiny_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
VARIANTS = ("v4", "v4.1")

# Spec section 1.1, in the order of its columns.
RELEASED: dict[str, dict[str, Any]] = {
    "v4-flash": {
        "variant": Variant.V4,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "draft_experts": (256, 6),
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "rms_norm_eps": 1e-6,
        "compress_ratios": (0, 0, *(4, 128) * 20, 4),
        "feature_layer_ids": (40, 41, 42),
        "markov_rank": 256,
        "weight_block_size": 128,
        "kv_quant": (448, 64),
    },
    "v4-pro": {
        "variant": Variant.V4,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "draft_experts": (384, 6),
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "num_hash_layers": 3,
        "rms_norm_eps": 1e-6,
        "compress_ratios": (128, 128, *(4, 128) * 29, 4),
        "feature_layer_ids": (58, 59, 60),
        "markov_rank": 512,
        "weight_block_size": 128,
        "kv_quant": (448, 64),
    },
    "v4.1-flash": {
        "variant": Variant.V4_1,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "n_routed_experts": 384,
        "draft_experts": (128, 3),
        "moe_intermediate_size": 2304,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 0,
        "rms_norm_eps": 1e-20,
        "compress_ratios": (0, 0, *(2,) * 18, *(1,) * 20),
        "feature_layer_ids": (37, 38, 39),
        "markov_rank": 256,
        "weight_block_size": 32,
        "kv_quant": (512, 32),
    },
}
SAME_IN_ALL = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 128,
    "rope_theta": 1e4,
    "max_position_embeddings": 1048576,
}

# fmt: off
OPTIONAL = {
    "num_key_value_heads", "compress_rope_theta", "index_n_heads", "index_head_dim", "index_topk", "rope_scaling",
    "bos_token_id", "architectures", "model_type", "torch_dtype", "hidden_act", "attention_bias", "topk_method",
    "tie_word_embeddings", "use_cache",
}
# fmt: on


def changed(variant: str, **values: Any) -> dict[str, Any]:
    """A tiny configuration with language keys replaced, or left out where the value is ``...``."""
    config = tiny_config(variant)
    keys = language_keys(config)
    for key, value in values.items():
        if value is ...:
            del keys[key]
        else:
            keys[key] = value
    return config


def refusal(config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse_configs(config, **options)
    return str(error.value)


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_give_the_values_of_the_table(name: str) -> None:
    expected = {**SAME_IN_ALL, **RELEASED[name]}
    experts, kv_quant, rank = (expected.pop(key) for key in ("draft_experts", "kv_quant", "markov_rank"))
    target, draft = read_configs(CONFIGS / name)
    assert {key: getattr(target, key) for key in expected} == expected
    shared = {f.name for f in dataclasses.fields(draft)} - {"n_routed_experts"}
    assert {k: getattr(draft, k) for k in expected if k in shared} == {k: v for k, v in expected.items() if k in shared}
    assert (target.num_experts_per_tok, target.bos_token_id, target.eos_token_ids) == (6, 0, (1,))
    assert (target.kv_quant_width, target.kv_quant_group) == kv_quant
    assert (draft.n_routed_experts, draft.num_experts_per_tok) == experts
    assert (draft.num_stages, draft.block_size, draft.noise_token_id) == (3, 5, 128799)
    assert (draft.markov_rank, draft.num_features, draft.sample_from_anchor) == (rank, 3, True)


@pytest.mark.parametrize("name", RELEASED)
def test_round_trip_through_json(name: str) -> None:
    for kind, config in zip((TargetConfig, DraftConfig), read_configs(CONFIGS / name), strict=True):
        assert from_dict(kind, json.loads(json.dumps(to_dict(config)))) == config


def test_from_dict_names_missing_and_unknown_keys() -> None:
    values = to_dict(read_configs(CONFIGS / "v4-flash")[1])
    values["block"] = values.pop("block_size")
    with pytest.raises(ConfigError, match=r"unknown keys \['block'\], missing keys \['block_size'\]"):
        from_dict(DraftConfig, values)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_size", "x", ".hidden_size is 'x', expected an integer"),
        ("hidden_size", True, ".hidden_size is True, expected an integer"),
        ("rope_theta", float("nan"), ".rope_theta is nan, expected a number"),
        ("rope_theta", -1, ": rope_theta is -1.0, expected > 0"),
        ("variant", "v5", ".variant is 'v5', expected one of 'v4', 'v4.1'"),
        ("eos_token_ids", 3, ".eos_token_ids is 3, expected a list"),
        ("eos_token_ids", ["x"], ".eos_token_ids[0] is 'x', expected an integer"),
        ("feature_layer_ids", [99], ": feature_layer_ids is [99], expected distinct layers of 0..42"),
        ("sliding_window", 0, ": sliding_window is 0, expected > 0"),
    ],
)
def test_from_dict_checks_types_and_ranges(name: str, value: Any, expected: str) -> None:
    """Key, value and what was expected, in one line."""
    values = to_dict(read_configs(CONFIGS / "v4-flash")[0])
    with pytest.raises(ConfigError) as error:
        from_dict(TargetConfig, {**values, name: value}, "target")
    assert str(error.value) == f"target{expected}"


@pytest.mark.parametrize("asked", [-1, 0, 1, 3, 4, 6, 7])
def test_another_draft_length_than_the_trained_block_is_refused(asked: int) -> None:
    """POS-4: extra or missing noise rows change every row, so nothing is rounded or clamped."""
    draft = parse_configs(tiny_config("v4.1"))[1]
    check_draft_length(draft, 5)
    with pytest.raises(ConfigError, match=rf"^{asked} draft tokens requested.*blocks of 5"):
        check_draft_length(draft, asked)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layout_of_a_block(variant: str) -> None:
    """POS-2: as many rows as drafts by default, one more where row 0 is not sampled; anything but a flag is refused."""
    rows = {}
    for flag in (None, True, False):
        overrides = {} if flag is None else {"dspark_sample_from_anchor": flag}
        draft = parse_configs(tiny_config(variant, **overrides))[1]
        assert draft == from_dict(DraftConfig, to_dict(draft)) and draft.block_size == 5
        rows[flag] = draft.block_rows
    assert rows == {None: 5, True: 5, False: 6}
    assert "dspark_sample_from_anchor is 0, expected bool" in refusal(tiny_config(variant, dspark_sample_from_anchor=0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_markov_head_and_transform_of_logits(variant: str) -> None:
    """The released drafts have a vanilla head and no transform; what the bias goes through has to be said."""

    def draft(**overrides: Any) -> DraftConfig:
        found = parse_configs(tiny_config(variant, **overrides))[1]
        assert found == from_dict(DraftConfig, to_dict(found))
        return found

    plain = draft()
    assert (plain.markov_head, plain.logit_scale, plain.logit_softcap) == ("vanilla", 1.0, None)
    assert not plain.apply_output_logit_transform and not plain.transforms_logits
    assert draft(dspark_markov_head_type="rnn").markov_head == "rnn"
    both = draft(dspark_logit_scale=2, dspark_final_logit_softcapping=30, dspark_apply_output_logit_transform=True)
    assert (both.logit_scale, both.logit_softcap, both.apply_output_logit_transform) == (2.0, 30.0, True)
    assert (
        both.transforms_logits
        and draft(
            dspark_logit_scale=1.0, dspark_final_logit_softcapping=9.0, dspark_apply_output_logit_transform=False
        ).transforms_logits
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"dspark_markov_head_type": "lstm"},
            "dspark_markov_head_type is 'lstm', supported: ['gated', 'rnn', 'vanilla']",
        ),
        ({"dspark_logit_scale": 2.0}, "dspark_apply_output_logit_transform is missing"),
        ({"dspark_final_logit_softcapping": 30.0}, "dspark_apply_output_logit_transform is missing"),
        ({"dspark_logit_scale": 0.0, "dspark_apply_output_logit_transform": True}, "logit_scale is 0.0, expected > 0"),
        (
            {"dspark_final_logit_softcapping": -1.0, "dspark_apply_output_logit_transform": True},
            "dspark_final_logit_softcapping is -1.0, expected > 0",
        ),
        ({"dspark_logit_scale": "2", "dspark_apply_output_logit_transform": True}, "dspark_logit_scale is '2'"),
    ],
)
def test_markov_heads_that_are_refused(overrides: dict[str, Any], message: str) -> None:
    """ENG-8."""
    assert message in refusal(tiny_config("v4.1", **overrides))


@pytest.mark.parametrize("value", [..., -1, 320, "319", None, True, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_noise_token_must_be_there_and_in_the_vocabulary(variant: str, value: Any) -> None:
    """POS-5, ENG-8: a noise id from the wrong key, or left 0, embeds the wrong token in every draft row."""
    assert "dspark_noise_token_id" in refusal(changed(variant, dspark_noise_token_id=value))
    assert parse_configs(changed(variant, dspark_noise_token_id=0))[1].noise_token_id == 0
    assert parse_configs(changed(variant, dspark_noise_token_id=319))[1].noise_token_id == 319


@pytest.mark.parametrize("ids", [[1, 2, 4], [-1, 2, 3], [1, 1, 2], [], [1, 2, "3"], [1, 2, True]])
def test_feature_layers_must_be_distinct_layers_of_the_target(ids: list[Any]) -> None:
    """POS-6, ENG-8: out-of-range and duplicate ids raise."""
    assert f"dspark_target_layer_ids is {ids}" in refusal(changed("v4.1", dspark_target_layer_ids=ids))


@pytest.mark.parametrize(
    ("variant", "declared", "counted", "stages"),
    [("v4", 1, None, 3), ("v4", 1, 3, 3), ("v4", 1, 2, 2), ("v4", 3, 3, 3), ("v4.1", 3, None, 3), ("v4.1", 3, 3, 3)],
)
def test_stages_are_counted_from_the_tensors(variant: str, declared: int, counted: int | None, stages: int) -> None:
    """POS-8: V4's configurations say one stage although three ship."""
    config = changed(variant, num_nextn_predict_layers=declared, compress_ratios=[0] * (4 + stages))
    assert parse_configs(config, num_stages=counted)[1].num_stages == stages


@pytest.mark.parametrize(
    ("variant", "declared", "counted"), [("v4", 3, 1), ("v4", 2, 3), ("v4.1", 3, 1), ("v4.1", 1, 3)]
)
def test_a_real_conflict_over_the_number_of_stages_is_refused(variant: str, declared: int, counted: int) -> None:
    """POS-8: only V4's known trap is read differently from what it says."""
    message = refusal(changed(variant, num_nextn_predict_layers=declared), num_stages=counted)
    assert f"num_nextn_predict_layers is {declared}" in message
    assert f"{counted} draft stages" in message


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_key_that_nothing_reads_is_refused_unless_allowed(variant: str) -> None:
    """KV-9: a misspelt or new key may change results; the allow-list is the user's word that it can't."""
    config = changed(variant, dspark_window_causal=False, sliding_windows=64)
    message = refusal(config)
    assert "dspark_window_causal, sliding_windows" in message
    assert "sliding_windows" in refusal(config, allow_keys=["dspark_window_causal"])
    parse_configs(config, allow_keys=iter(["dspark_window_causal", "sliding_windows"]))


def test_unknown_keys_are_found_in_every_part() -> None:
    """KV-9: at the root, under text_config and under quantization_config."""
    config = changed("v4.1", inner=1)
    config["outer"] = config["quantization_config"]["quant"] = 1
    message = refusal(config)
    for where, key in (("config.json", "outer"), ("text_config", "inner"), ("quantization_config", "quant")):
        assert f"{where}: keys that this version does not know: {key}" in message


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_key_is_needed_and_of_one_type(variant: str) -> None:
    """Facts of the checkpoint have no defaults: without a key, or with a string, nothing is built."""
    parse_configs(tiny_config(variant))
    read = 0
    for key in language_keys(tiny_config(variant)):
        if key in OPTIONAL:
            continue
        read += 1
        assert key in refusal(changed(variant, **{key: ...}))
        assert key in refusal(changed(variant, **{key: "seven"}))
    assert read > 25


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_mult", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("num_key_value_heads", 8),
        ("gate_temp", 2.0),
        ("num_experts_per_tok", 9),
        ("num_hash_layers", 5),
        ("dspark_markov_rank", 0),
        ("rms_norm_eps", 0.0),
        ("rope_theta", -1.0),
        ("o_groups", 3),
        ("qk_rope_head_dim", 15),
        ("dspark_block_size", 0),
        ("vocab_size", -320),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("eos_token_id", ["</s>"]),
        ("bos_token_id", "<s>"),
        ("compress_ratios", [0, 0, 0]),
        ("compress_ratios", [0, 0, 0, 0, 4, 0, 0]),
        ("dspark_num_experts_per_tok", 5),
        ("dspark_n_activated_experts", 1),
    ],
)
def test_a_value_that_this_package_does_not_build_is_refused(key: str, value: Any) -> None:
    target, draft = "9 experts per token of 8", "5 experts per token of 4"
    named = {"num_experts_per_tok": target, "dspark_num_experts_per_tok": draft}
    message = refusal(changed("v4.1", **{key: value}))
    assert named.get(key, key.removeprefix("dspark_")) in message


def test_either_name_of_the_drafts_top_k_is_read() -> None:
    """CK-8: the draft's own experts, never the backbone's 8 and 2."""
    config = changed("v4.1", dspark_num_experts_per_tok=..., dspark_n_activated_experts=3, num_experts_per_tok=2)
    target, draft = parse_configs(config)
    assert (target.n_routed_experts, target.num_experts_per_tok) == (8, 2)
    assert (draft.n_routed_experts, draft.num_experts_per_tok) == (4, 3)


@pytest.mark.parametrize("block", [[32], [32, 128], [64, 64], [32, 32, 32], 32])
def test_unknown_weight_blocks_are_refused(block: Any) -> None:
    """CK-5: a scale layout that is neither 32 x 32 nor 128 x 128."""
    config = tiny_config("v4.1")
    config["quantization_config"]["weight_block_size"] = block
    assert "weight_block_size" in refusal(config)


@pytest.mark.parametrize(("key", "value"), [("fmt", "e5m2"), ("scale_fmt", "fp32"), ("quant_method", "awq")])
def test_another_quantisation_is_refused(key: str, value: str) -> None:
    """CK-5: scales with another meaning."""
    config = tiny_config("v4")
    config["quantization_config"][key] = value
    assert f"{key} is '{value}'" in refusal(config)


def test_all_problems_come_in_one_message() -> None:
    config = changed("v4", head_dim=..., hidden_size="wide", hc_mult=3, typo=1)
    config["quantization_config"]["scale_fmt"] = "fp32"
    message = refusal(config)
    for problem in ("head_dim is missing", "hidden_size is 'wide'", "hc_mult is 3", "typo", "scale_fmt is 'fp32'"):
        assert problem in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "not found"),
        ("{", "not valid JSON"),
        (b"\xff\xfe{}", "config.json: not valid JSON in UTF-8 .*; download the file again"),
        ("[]", "expected a JSON object"),
        ('{"text_config": 1}', "text_config"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | bytes | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=problem):
        read_configs(tmp_path)


@pytest.mark.parametrize(
    ("name", "possible"), [("v4-flash", [1, 2, 4, 8]), ("v4-pro", [1, 2, 4, 8]), ("v4.1-flash", [1, 2, 4, 8])]
)
def test_tensor_parallel_sizes_that_split_nothing_in_two(name: str, possible: list[int]) -> None:
    """TP-12: sizes that cut heads, output groups or quantisation blocks are refused, with those that work."""
    for config in read_configs(CONFIGS / name):
        for size in (-1, 0, *range(1, 17)):
            if size in possible:
                config.check_tensor_parallel(size)
                continue
            with pytest.raises(ConfigError, match=rf"size {size} is not possible.*{possible}".replace("[", r"\[")):
                config.check_tensor_parallel(size)


def test_tensor_parallel_must_not_cut_a_block_of_scales() -> None:
    """A whole dimension may end in a partial block; 8 heads of 96 channels in blocks of 128 don't split over 4."""
    target, _ = parse_configs(changed("v4", head_dim=96, qk_rope_head_dim=32))
    target.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="num_attention_heads x head_dim 768 does not split into whole quantisation"):
        target.check_tensor_parallel(4)
