"""The table of released tensors, and checkpoints that do not hold exactly what it lists."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.builder.checkpoint import CheckpointError, count_stages, plan_conversion, released_tensors
from dspark_trt.builder.checkpoint.tensor_file import TensorInfo
from dspark_trt.builder.config import ConfigError, parse_configs, read_configs

from tests.released import language_keys, random_tensors, tiny_config, write_checkpoint, write_sparse

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
VARIANTS = ("v4", "v4.1")
Headers = dict[str, tuple[str, tuple[int, ...]]]

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def headers(config: dict[str, Any]) -> Headers:
    """Dtypes and shapes as the specification has them, written out in tests/released.py."""
    return {name: (_NAMES[t.dtype], tuple(t.shape)) for name, t in random_tensors(config).items()}


def write_headers(directory: Path, config: dict[str, Any], tensors: Headers) -> Path:
    """A checkpoint with the right headers and no data, which planning a conversion never reads."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_sparse(directory / "model.safetensors", tensors)
    return directory


def refusal(directory: Path, config: dict[str, Any], tensors: Headers, **options: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        plan_conversion(write_headers(directory, config, tensors), tp_size=1, **options)
    return str(error.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_equals_the_specification(variant: str) -> None:
    config = tiny_config(variant)
    target, draft = parse_configs(config)
    table = released_tensors(target, draft)
    assert {name: (entry.dtypes[0], entry.shape) for name, entry in table.items()} == headers(config)


def test_v41_draft_has_the_published_number_of_tensors_and_bytes() -> None:
    """CK-1: spec section 1.2 counts 2401 tensors and 7.933 GB under mtp.*."""
    table = released_tensors(None, read_configs(CONFIGS / "v4.1-flash")[1])
    draft = [entry for name, entry in table.items() if name.startswith("mtp.")]
    assert len(draft) == 2401
    assert sum(TensorInfo(entry.dtypes[0], entry.shape).nbytes for entry in draft) == pytest.approx(7.933e9, rel=1e-4)
    assert table["mtp.0.main_proj.scale"].shape == (160, 480)
    assert released_tensors(None, read_configs(CONFIGS / "v4-flash")[1])["mtp.0.main_proj.scale"].shape == (32, 96)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_released_tensor_has_one_place_of_its_own(variant: str) -> None:
    """CK-1: two tensors may share a place only as wo_a's weight and scale, or as experts of one stack."""
    table = released_tensors(*parse_configs(tiny_config(variant)))
    places = Counter((entry.model_name, entry.expert) for entry in table.values() if entry.model_name)
    shared = {place for place, count in places.items() if count > 1}
    assert shared == {(name, None) for name in table if name.endswith("attn.wo_a.weight")}
    dropped = [name for name, entry in table.items() if entry.model_name is None]
    assert all(name.endswith("ffn.gate.bias_vl") for name in dropped)
    assert len(dropped) == {"v4": 0, "v4.1": 7}[variant]


@pytest.mark.parametrize(
    ("variant", "released", "model_name", "expert"),
    [
        ("v4", "mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.embed.weight", None),
        ("v4", "mtp.2.markov_head.markov_w2.weight", "mtp.2.markov_head.head.weight", None),
        ("v4.1", "mtp.2.markov_head.embed.weight", "mtp.2.markov_head.embed.weight", None),
        ("v4.1", "mtp.2.markov_head.head.weight", "mtp.2.markov_head.head.weight", None),
        ("v4", "mtp.1.ffn.shared_experts.w1.scale", "mtp.1.ffn.shared_experts.w1.scale", None),
        ("v4", "mtp.1.ffn.experts.0.w1.scale", "mtp.1.ffn.experts.w1.scale", 0),
        ("v4", "mtp.1.ffn.experts.7.w3.weight", "mtp.1.ffn.experts.w3.weight", 7),
        ("v4.1", "layers.3.ffn.experts.0.w2.weight", "layers.3.ffn.experts.w2.weight", 0),
        ("v4", "layers.0.ffn.gate.tid2eid", "layers.0.ffn.gate.tid2eid", None),
        ("v4.1", "embed.weight", "embed.weight", None),
    ],
)
def test_names_that_look_alike_land_where_they_belong(
    variant: str, released: str, model_name: str, expert: int | None
) -> None:
    """CK-2: markov_w1 and shared_experts.w1 caught by a rule for experts. CK-3: expert 0 taken for none."""
    entry = released_tensors(*parse_configs(tiny_config(variant)))[released]
    assert (entry.model_name, entry.expert) == (model_name, expert)


@pytest.mark.parametrize(
    ("names", "stages"),
    [(["mtp.0.x"], 1), (["mtp.1.x", "mtp.0.y", "layers.7.x", "embed"], 2), ([f"mtp.{s}.x" for s in range(11)], 11)],
)
def test_stages_are_counted_from_names(names: list[str], stages: int) -> None:
    """POS-8: the loader must not believe a key."""
    assert count_stages(names) == stages


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["mtp.0.x", "mtp.2.x"], r"draft stages \[0, 2\] have tensors and \[1\] have none"),
        (["mtp.1.x"], r"\[1\] have tensors and \[0\] have none"),
        (["layers.0.x", "mtp", "mtp.x.0.y", "xmtp.0.y", "mtp.01.x"], r"no tensor is called mtp.0"),
    ],
)
def test_gaps_between_stages_are_refused(names: list[str], problem: str) -> None:
    """POS-8: stages 0 and 2 without 1."""
    with pytest.raises(CheckpointError, match=problem):
        count_stages(names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_with_another_number_of_stages_than_its_key_says(variant: str, tmp_path: Path) -> None:
    """POS-8: V4's 1 with three stages is read, V4.1's 3 with one stage is refused."""
    config = tiny_config(variant, compress_ratios=[0] * 4)
    if variant == "v4":
        assert plan_conversion(write_headers(tmp_path, config, headers(config)), tp_size=1).draft.num_stages == 3
    else:
        write_checkpoint(tmp_path, config, stages=1)
        with pytest.raises(ConfigError, match="num_nextn_predict_layers is 3, but the checkpoint holds 1 draft stages"):
            plan_conversion(tmp_path, tp_size=1)


@pytest.mark.parametrize("draft_only", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_missing_tensor_is_named(variant: str, draft_only: bool, tmp_path: Path) -> None:
    """CK-4: remove each tensor in turn; nothing is loaded without it."""
    config = tiny_config(variant)
    complete = headers(config)
    plan = plan_conversion(write_headers(tmp_path, config, complete), tp_size=1, draft_only=draft_only)
    assert len(plan.entries) == len(complete) or draft_only
    for name in plan.entries:
        tensors = {other: info for other, info in complete.items() if other != name}
        assert f"1 missing: {name}" in refusal(tmp_path, config, tensors, draft_only=draft_only)


def test_all_missing_tensors_are_listed(tmp_path: Path) -> None:
    """CK-1: twelve shared-expert tensors, which a rule for experts would catch."""
    config = tiny_config("v4")
    tensors = headers(config)
    gone = [n for n in tensors if n.startswith("mtp.") and "shared_experts" in n and n[4] != "0"]
    assert len(gone) == 12
    for name in gone:
        del tensors[name]
    assert f"12 missing: {', '.join(sorted(gone))}" in refusal(tmp_path, config, tensors)


@pytest.mark.parametrize("name", ["mtp.0.ffn.shared_experts.w4.weight", "mtp.3x.norm.weight", "mtp.norm.weight"])
def test_an_extra_draft_tensor_is_refused(name: str, tmp_path: Path) -> None:
    config = tiny_config("v4.1")
    tensors = {**headers(config), name: ("BF16", (4,))}
    assert f"1 not known: {name}" in refusal(tmp_path, config, tensors, draft_only=True)


def test_extra_tensors_outside_the_draft_matter_to_the_target_alone(tmp_path: Path) -> None:
    config = tiny_config("v4.1")
    extra: Headers = {"layers.2.attn.indexer.wq_b.weight": ("BF16", (4, 4)), "vision.patch.weight": ("F16", (4,))}
    tensors = headers(config) | extra
    assert f"2 not known: {', '.join(extra)}" in refusal(tmp_path, config, tensors)
    plan = plan_conversion(tmp_path, tp_size=1, draft_only=True)
    assert plan.target is None
    assert {name.split(".")[0] for name in plan.stored} == {"mtp", "embed", "head"}


@pytest.mark.parametrize("name", ["mtp.2.hc_head_fn", "hc_head_fn"])
@pytest.mark.parametrize("draft_only", [True, False])
def test_v41_with_a_learned_head_collapse_is_refused(name: str, draft_only: bool, tmp_path: Path) -> None:
    """HC-6: V4.1 collapses with the last pre-mix; such tensors mean that config.json is another release's."""
    config = tiny_config("v4.1")
    message = refusal(tmp_path, config, {**headers(config), name: ("F32", (4, 1024))}, draft_only=draft_only)
    assert f"tensors of V4's learned collapse: {name}; config.json and the tensors belong to different" in message


def test_v4_without_its_learned_head_collapse_is_refused(tmp_path: Path) -> None:
    """HC-6: nothing is invented in its place."""
    config = tiny_config("v4")
    tensors = {name: info for name, info in headers(config).items() if not name.startswith("mtp.2.hc_head")}
    expected = "3 missing: mtp.2.hc_head_base, mtp.2.hc_head_fn, mtp.2.hc_head_scale"
    assert expected in refusal(tmp_path, config, tensors)


@pytest.mark.parametrize("variant", VARIANTS)
def test_markov_tables_under_the_other_releases_names_are_refused(variant: str, tmp_path: Path) -> None:
    """CK-2: both names are listed, the one that is there and the one that is not."""
    config = tiny_config(variant)
    names = ("markov_head.markov_w1", "markov_head.embed")
    there, other = names if variant == "v4" else names[::-1]
    tensors = {name.replace(there, other): info for name, info in headers(config).items()}
    message = refusal(tmp_path, config, tensors)
    assert f"1 missing: mtp.2.{there}.weight" in message
    assert f"1 not known: mtp.2.{other}.weight" in message


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "projection"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_projections_of_markov_heads(kind: str, projection: str, variant: str, tmp_path: Path) -> None:
    """Wanted where config.json names such a head, under their released names, and refused where it does not."""
    config, plain = tiny_config(variant, dspark_markov_head_type=kind), tiny_config(variant)
    complete = headers(config)
    names = {f"mtp.2.markov_head.{projection}.{part}" for part in ("weight", "bias")}
    assert set(complete) - set(headers(plain)) == names
    plan = plan_conversion(write_headers(tmp_path, config, complete), tp_size=2)
    assert {plan.entries[name].split for name in names} == {None} and names <= set(plan.rank_tensors)
    for name in names:
        tensors = {other: info for other, info in complete.items() if other != name}
        assert f"1 missing: {name}" in refusal(tmp_path, config, tensors)
    assert f"2 not known: {', '.join(sorted(names))}" in refusal(tmp_path, plain, complete)
    other = tiny_config(variant, dspark_markov_head_type="rnn" if kind == "gated" else "gated")
    message = refusal(tmp_path, other, complete)
    assert "2 missing" in message and f"2 not known: {', '.join(sorted(names))}" in message
    rank = {"gated": 32, "rnn": 96}[kind]
    bias = f"mtp.2.markov_head.{projection}.bias"
    wrong = {**complete, bias: ("BF16", (rank - 1,))}
    assert f"{bias} has shape [{rank - 1}], config.json makes it [{rank}]" in refusal(tmp_path, config, wrong)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mtp.0.attn.wkv.weight", "BF16"),
        ("mtp.0.attn.wkv.scale", "F32"),
        ("mtp.2.norm.weight", "F32"),
        ("embed.weight", "F16"),
    ],
)
def test_a_wrong_dtype_is_shown_with_the_expected_one(name: str, dtype: str, tmp_path: Path) -> None:
    """CK-5: scales as float32 would be another layout altogether."""
    config = tiny_config("v4.1")
    tensors = headers(config)
    expected, shape = tensors[name]
    message = refusal(tmp_path, config, {**tensors, name: (dtype, shape)})
    assert f"{name} has dtype {dtype}, expected {expected}" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mtp.1.attn.wq_b.scale", (4, 1)),  # as of 128 x 128 blocks
        ("mtp.1.attn.wo_a.weight", (128, 256)),  # transposed
        ("mtp.0.ffn.experts.3.w2.weight", (256, 128)),  # one code a byte
        ("mtp.2.confidence_head.proj.weight", (288,)),
    ],
)
def test_a_wrong_shape_is_shown_with_the_expected_one(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """CK-5: 32 x 32 blocks read as 128 x 128, or the reverse."""
    config = tiny_config("v4.1")
    tensors = headers(config)
    dtype, expected = tensors[name]
    message = refusal(tmp_path, config, {**tensors, name: (dtype, shape)})
    assert f"{name} has shape {[*shape]}, config.json makes it {[*expected]}" in message


def test_a_router_that_contradicts_the_configuration_is_shown_with_both(tmp_path: Path) -> None:
    """CK-8: the backbone's 8 experts taken for the draft's 4."""
    config = tiny_config("v4.1")
    tensors = headers(config)
    language_keys(config)["dspark_n_routed_experts"] = 8
    message = refusal(tmp_path, config, tensors)
    assert "mtp.0.ffn.gate.weight has shape [4, 256], config.json makes it [8, 256]" in message
    assert "mtp.2.ffn.experts.7.w3.weight" in message


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_a_draft_without_the_embedding_and_head_that_it_shares_is_refused(names: list[str], tmp_path: Path) -> None:
    """CK-9: the draft has none of its own."""
    config = tiny_config("v4.1")
    tensors = {name: info for name, info in headers(config).items() if name not in names}
    assert f"{len(names)} missing: {', '.join(names)}" in refusal(tmp_path, config, tensors, draft_only=True)


@pytest.mark.parametrize("shape", [(320, 512), (64, 256)])
def test_an_embedding_of_another_size_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    """CK-9, ENG-8: a target of a different hidden size, or a reduced vocabulary."""
    config = tiny_config("v4.1")
    tensors = {**headers(config), "embed.weight": ("BF16", shape)}
    message = refusal(tmp_path, config, tensors, draft_only=True)
    assert f"embed.weight has shape {list(shape)}, config.json makes it [320, 256]" in message


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
def test_fp4_rows_that_end_inside_a_block_are_refused(key: str, tmp_path: Path) -> None:
    """CK-7: K is not a multiple of 32."""
    config = tiny_config("v4.1")
    tensors = headers(config)
    language_keys(config)[key] = 144
    assert f"{key} 144: FP4 expert weights need multiples of 32" in refusal(tmp_path, config, tensors)


def test_all_kinds_of_problems_come_in_one_message(tmp_path: Path) -> None:
    config = tiny_config("v4")
    tensors = headers(config)
    del tensors["mtp.1.attn.wkv.scale"]
    tensors |= {
        "mtp.1.attn.wkv.scale_inv": ("F32", (1, 2)),
        "norm.weight": ("F32", (256,)),
        "hc_head_base": ("F32", (1,)),
    }
    message = refusal(tmp_path, config, tensors)
    for problem in (
        "1 missing: mtp.1.attn.wkv.scale\n",
        "1 not known: mtp.1.attn.wkv.scale_inv\n",
        "norm.weight has dtype F32, expected BF16",
        "hc_head_base has shape [1], config.json makes it [4]",
    ):
        assert problem in message


def test_a_target_with_compressed_attention_asks_for_draft_only(tmp_path: Path) -> None:
    config = tiny_config("v4", compress_ratios=[0, 4, 128, 4, 0, 0, 0])
    message = refusal(tmp_path, config, headers(config))
    assert "3 target layers have compressed attention (the first is layer 1)" in message
    assert "--draft-only" in message
    plan_conversion(tmp_path, tp_size=1, draft_only=True)


def test_keys_are_passed_over_on_request(tmp_path: Path) -> None:
    """KV-9, through the converter."""
    config = tiny_config("v4", brand_new_key=1)
    assert "brand_new_key" in refusal(tmp_path, config, headers(config))
    plan_conversion(tmp_path, tp_size=1, allow_keys=["brand_new_key"])
