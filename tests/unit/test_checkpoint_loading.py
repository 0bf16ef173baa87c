"""Filling models from rank shards, in both numerics, and shard directories that are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from dspark_trt.builder.checkpoint import CheckpointError, convert_checkpoint, load_shard, read_shard_config
from dspark_trt.builder.checkpoint.loading import rank_file_facts
from dspark_trt.builder.checkpoint.tensor_file import read_header
from dspark_trt.builder.config import Numerics, Variant, parse_configs
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.draft import DraftModel
from dspark_trt.builder.model.target import TargetModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.released import tiny_config, write_checkpoint

VARIANTS = ("v4", "v4.1")
BF16 = torch.bfloat16
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_VALUES += [-value for value in FP4_VALUES]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Shards of two ranks for either variant, made once."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp(variant)
            write_checkpoint(made[variant] / "released", tiny_config(variant))
            convert_checkpoint(made[variant] / "released", made[variant] / "shards", tp_size=2)
        return made[variant] / "shards"

    return make


def build(variant: str, network: str, numerics: Numerics, dtype: torch.dtype = BF16) -> nn.Module:
    """A rank's network of two, its parameters full of a value that no checkpoint holds."""
    target, draft = parse_configs(tiny_config(variant))
    context = BuildContext(numerics, dtype, 2)
    model = DraftModel(draft, context) if network == "draft" else TargetModel(target, context)
    for parameter in model.state_dict().values():
        parameter.fill_(torch.nan if parameter.is_floating_point() else 77)
    return model


def definition(shard: dict[str, Tensor], name: str, block: int) -> Tensor:
    """Float64 values of a quantised weight, from the definition of its codes and scales."""
    packed, scale = shard[name], shard[name.removesuffix("weight") + "scale"]
    exponents = scale.view(torch.uint8).double() - 127
    if ".experts." in name:
        bytes_ = packed.view(torch.uint8).long()
        codes = torch.stack((bytes_ % 16, bytes_ // 16), -1).flatten(-2)
        return torch.tensor(FP4_VALUES, dtype=torch.float64)[codes] * 2.0 ** exponents.repeat_interleave(32, -1)
    rows, columns = (torch.arange(size) // block for size in packed.shape)
    return packed.view(torch.float8_e4m3fn).double() * 2.0 ** exponents[rows][:, columns]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("network", ["draft", "target"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_released_model_holds_the_bytes_of_its_shard(
    variant: str, network: Literal["draft", "target"], rank: int, converted: Callable[[str], Path]
) -> None:
    """CK-1: every parameter is written, with the tensor of its own name."""
    path = converted(variant) / f"rank{rank}.safetensors"
    model = build(variant, network, Numerics.RELEASED)
    load_shard(model, path, network=network)
    shard = load_file(path)
    state = model.state_dict()
    assert all(torch.equal(tensor, shard[name].to(tensor.dtype)) for name, tensor in state.items())
    left = {name for name in shard if name not in state}
    assert all(name.startswith("mtp.") != (network == "draft") for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("network", ["draft", "target"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dequantized_model_holds_the_values_rounded_once(
    variant: str, network: Literal["draft", "target"], dtype: torch.dtype, converted: Callable[[str], Path]
) -> None:
    """CK-3, CK-5: values follow from the definition of codes and scales, for expert 0 as for the last."""
    path = converted(variant) / "rank1.safetensors"
    model = build(variant, network, Numerics.DEQUANTIZED, dtype)
    load_shard(model, path, network=network)
    shard = load_file(path)
    block = {"v4": 128, "v4.1": 32}[variant]
    quantized = 0
    for name, tensor in model.state_dict().items():
        if shard[name].dtype == torch.int8:
            quantized += 1
            assert torch.equal(tensor, definition(shard, name, block).to(dtype)), name
        else:
            assert torch.equal(tensor, shard[name].to(tensor.dtype)), name
    assert quantized == {"draft": 3 * 10 + 1, "target": 4 * 10}[network]


class Holder(nn.Module):
    """A model whose state dict is given."""

    def __init__(self, **tensors: Tensor):
        super().__init__()
        for path, tensor in tensors.items():
            module: nn.Module = self
            *parents, leaf = path.split("__")
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, nn.Module())
                module = getattr(module, parent)
            module.register_buffer(leaf, tensor)


@pytest.fixture
def small(converted: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes a one-rank shard of given tensors, with the V4.1 configuration (blocks of 32)."""

    def write(**tensors: Tensor) -> Path:
        config = json.loads((converted("v4.1") / "config.json").read_text())
        path = tmp_path / "rank0.safetensors"
        save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
        config.update(mapping={"tp_size": 1}, rank_files=rank_file_facts(tmp_path, [path.name]))
        (tmp_path / "config.json").write_text(json.dumps(config))
        return path

    return write


def test_fp4_codes_in_known_order(small: Callable[..., Path]) -> None:
    """CK-7: codes 0..15, low nibble first, code 8 is -0; one block of 32 with another scale."""
    row = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8).view(torch.int8)
    weight = row.repeat(4).reshape(1, 1, 32)
    scale = torch.tensor([[[127, 130]]], dtype=torch.uint8).view(torch.int8)
    path = small(mtp__0__experts__w1__weight=weight, mtp__0__experts__w1__scale=scale)
    model = Holder(mtp__0__experts__w1__weight=torch.full((1, 1, 64), torch.nan))
    load_shard(model, path, network="draft")
    values = model.state_dict()["mtp.0.experts.w1.weight"].flatten()
    codes = torch.tensor(FP4_VALUES)
    assert torch.equal(values, torch.cat((codes, codes, 8 * codes, 8 * codes)))
    assert values[8].signbit()


def test_fp8_blocks_at_the_edge_are_partial(small: Callable[..., Path]) -> None:
    """CK-5: weights of 1, a scale of 2^k in each block; the value tells which block a weight is in."""
    weight = torch.ones(40, 70).to(torch.float8_e4m3fn).view(torch.int8)
    scale = (127 + torch.arange(6, dtype=torch.uint8)).reshape(2, 3).view(torch.int8)
    path = small(mtp__0__wkv__weight=weight, mtp__0__wkv__scale=scale)
    model = Holder(mtp__0__wkv__weight=torch.empty(40, 70))
    load_shard(model, path, network="draft")
    values = model.state_dict()["mtp.0.wkv.weight"]
    assert torch.equal(values[:32, :32], torch.full((32, 32), 1.0))
    assert torch.equal(values[:32, 64:], torch.full((32, 6), 4.0))
    assert torch.equal(values[32:, 32:64], torch.full((8, 32), 16.0))


def test_widening_is_exact_and_narrowing_is_refused(small: Callable[..., Path]) -> None:
    norm = torch.randn(8, generator=torch.Generator().manual_seed(0))
    path = small(mtp__0__norm=norm.to(BF16), mtp__0__ids=torch.arange(4, dtype=torch.int32), mtp__0__sink=norm)
    model = Holder(
        mtp__0__norm=torch.empty(8), mtp__0__ids=torch.empty(4, dtype=torch.int64), mtp__0__sink=torch.empty(8)
    )
    load_shard(model, path, network="draft")
    state = model.state_dict()
    assert torch.equal(state["mtp.0.norm"], norm.to(BF16).float())
    assert torch.equal(state["mtp.0.ids"], torch.arange(4))
    narrow = Holder(
        mtp__0__norm=torch.empty(8, dtype=torch.float16),
        mtp__0__ids=torch.empty(4, dtype=torch.int16),
        mtp__0__sink=torch.empty(8, dtype=BF16),
    )
    with pytest.raises(CheckpointError) as error:
        load_shard(narrow, path, network="draft")
    for name, source, wanted in (("norm", "BF16", "float16"), ("ids", "I32", "int16"), ("sink", "F32", "bfloat16")):
        assert f"mtp.0.{name} is {source} in the shard, the model's torch.{wanted} can't hold it" in str(error.value)


def test_values_beyond_float16_are_refused(small: Callable[..., Path]) -> None:
    """SMP-12's cause at load time: 448 x 2^8 has no float16 value."""
    weight = torch.full((32, 32), 448.0).to(torch.float8_e4m3fn).view(torch.int8)
    path = small(mtp__0__wkv__weight=weight, mtp__0__wkv__scale=torch.full((1, 1), 127 - 121, dtype=torch.int8))
    load_shard(Holder(mtp__0__wkv__weight=torch.empty(32, 32, dtype=torch.float16)), path, network="draft")
    scale = torch.tensor([[135]], dtype=torch.uint8).view(torch.int8)
    path = small(mtp__0__wkv__weight=weight, mtp__0__wkv__scale=scale)
    load_shard(Holder(mtp__0__wkv__weight=torch.empty(32, 32, dtype=BF16)), path, network="draft")
    with pytest.raises(CheckpointError, match=r"mtp.0.wkv.weight has values beyond float16's 65504"):
        load_shard(Holder(mtp__0__wkv__weight=torch.empty(32, 32, dtype=torch.float16)), path, network="draft")


def test_a_shard_and_a_model_that_differ_list_everything_and_write_nothing(small: Callable[..., Path]) -> None:
    """CK-1, CK-4: missing, extra and misshapen tensors in one message."""
    path = small(
        mtp__0__a=torch.ones(2),
        mtp__0__b=torch.ones(3),
        mtp__0__wq__weight=torch.zeros(64, 64, dtype=torch.int8),
        mtp__0__wk__weight=torch.zeros(64, 64, dtype=torch.int8),
        mtp__0__wk__scale=torch.zeros(64, 2, dtype=torch.int8),
        layers__0__x=torch.ones(1),
    )
    model = Holder(
        mtp__0__a=torch.zeros(2),
        mtp__0__c=torch.zeros(2),
        mtp__0__wq__weight=torch.zeros(64, 64),
        mtp__0__wk__weight=torch.zeros(64, 128),
    )
    with pytest.raises(CheckpointError) as error:
        load_shard(model, path, network="draft")
    for problem in (
        "2 missing from the shard: mtp.0.c, mtp.0.wq.scale\n",
        "1 without a place in the model: mtp.0.b\n",
        "mtp.0.wk.scale has shape [64, 2], FP8 weights of shape [64, 64] need [2, 2]",
        "mtp.0.wk.weight has shape [64, 64] in the shard, [64, 128] in the model",
    ):
        assert problem in str(error.value)
    assert all(not tensor.any() for tensor in model.state_dict().values())


def test_scales_of_experts_in_another_layout_are_refused(small: Callable[..., Path]) -> None:
    """CK-5: blocks of 16, as NVFP4 has them."""
    path = small(
        mtp__0__experts__w1__weight=torch.zeros(2, 4, 32, dtype=torch.int8),
        mtp__0__experts__w1__scale=torch.zeros(2, 4, 4, dtype=torch.int8),
    )
    with pytest.raises(
        CheckpointError, match=r"has shape \[2, 4, 4\], FP4 weights of shape \[2, 4, 64\] need \[2, 4, 2\]"
    ):
        load_shard(Holder(mtp__0__experts__w1__weight=torch.zeros(2, 4, 64)), path, network="draft")


def test_a_model_without_storage_is_refused(small: Callable[..., Path]) -> None:
    """Copying to the meta device does nothing, and says nothing."""
    path = small(mtp__0__a=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"mtp.0.a is on the meta device"):
        load_shard(Holder(mtp__0__a=torch.empty(2, device="meta")), path, network="draft")


def test_shard_configuration_round_trip(converted: Callable[[str], Path]) -> None:
    config = read_shard_config(converted("v4"))
    target, draft = parse_configs(tiny_config("v4"))
    assert (config.target, config.draft, config.tp_size) == (target, draft, 2)
    assert config.draft.variant is Variant.V4
    assert sorted(config.rank_files) == ["rank0.safetensors", "rank1.safetensors"]


def edited(**values: Any) -> Callable[[Path], object]:
    """Replaces keys of config.json."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def edited_draft(**values: Any) -> Callable[[Path], object]:
    """Replaces keys of config.json's draft."""
    return lambda directory: edited(draft=json.loads((directory / "config.json").read_text())["draft"] | values)(
        directory
    )


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: (d / "config.json").unlink(), "not found; expected a directory that dspark-convert wrote"),
        (lambda d: (d / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"), "config.json: not valid JSON in UTF-8"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json: holds a list, expected a JSON object"),
        (edited(version=1), "version 1, expected 'dspark-trt shards' version 2; run dspark-convert again"),
        (edited(version=99), "'dspark-trt shards' version 99, expected 'dspark-trt shards' version 2"),
        (edited(format="other"), "format 'other' version 2, expected"),
        (edited(draft={}), "not a shard configuration: draft: unknown keys .*missing keys"),
        (edited(draft=3), "draft is 3, expected an object"),
        (edited_draft(hidden_size="x"), "draft.hidden_size is 'x', expected an integer"),
        (edited_draft(block_size=-3), "draft: block_size is -3, expected > 0"),
        (edited_draft(o_groups=0), "draft: o_groups is 0, expected > 0"),
        (edited_draft(noise_token_id=10**9), r"draft: noise_token_id is 1000000000, expected 0\.\.319"),
        (edited(mapping={}), "mapping: unknown keys .*tp_size"),
        (edited(mapping={"tp_size": "2"}), "mapping.tp_size is '2', expected an integer"),
        (edited(mapping={"tp_size": 0}, rank_files={}), "tensor parallel size 0 needs"),
        (edited(rank_files={"rank0.safetensors": 7}), r"rank_files\['rank0.safetensors'\] is 7, expected an object"),
        (edited(mapping={"tp_size": 3}), r"tensor parallel size 3 needs .*rank2.safetensors"),
        (lambda d: (d / "rank1.safetensors").unlink(), "rank1.safetensors is missing"),
        (lambda d: (d / "rank0.safetensors").write_bytes(b"x"), r"rank0.safetensors has 1 bytes, \d+ were written"),
    ],
)
def test_a_damaged_shard_directory_is_refused(
    damage: Callable[[Path], object], problem: str, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in converted("v4.1").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    read_shard_config(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=problem) as error:
        read_shard_config(tmp_path)
    assert "dspark-convert" in str(error.value)
    assert "\n" not in str(error.value)


def damage(file: Path) -> None:
    """Other bytes in the middle; size and header stay."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        before = opened.read(3000)
        opened.seek(-len(before), 1)
        opened.write(bytes(255 - byte for byte in before))


@pytest.mark.parametrize("network", ["draft", "target"])
def test_damaged_weights_are_not_loaded(
    network: Literal["draft", "target"], converted: Callable[[str], Path], tmp_path: Path
) -> None:
    """A file of the right size whose bytes are not those that were written decodes text, only other text."""
    for file in converted("v4.1").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "rank1.safetensors")
    load_shard(build("v4.1", network, Numerics.RELEASED), tmp_path / "rank0.safetensors", network=network)
    written = json.loads((tmp_path / "config.json").read_text())["rank_files"]["rank1.safetensors"]["sha256"]
    found = hashlib.sha256((tmp_path / "rank1.safetensors").read_bytes()).hexdigest()
    with pytest.raises(CheckpointError) as error:
        load_shard(build("v4.1", network, Numerics.RELEASED), tmp_path / "rank1.safetensors", network=network)
    assert str(error.value) == (
        f"{tmp_path}: damaged weights: rank1.safetensors has sha256 {found[:12]}..., {written[:12]}... was written; "
        "copy it again, or run dspark-convert (and dspark-build) again"
    )


def test_a_rank_file_that_may_not_be_read_is_not_called_missing(
    converted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted("v4.1") / "rank0.safetensors"
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    message = r"rank0.safetensors: can't be read \(Permission denied\); make it readable for this user$"
    with pytest.raises(CheckpointError, match=message):
        load_shard(build("v4.1", "draft", Numerics.RELEASED), path, network="draft")
    with pytest.raises(CheckpointError, match=message):
        read_header(path)
