"""Conversion into rank shards: what arrives, what is refused, and how much memory it takes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_trt.builder.checkpoint import (
    CheckpointError,
    convert_checkpoint,
    plan_conversion,
    rank_file_name,
    read_shard_config,
    released_tensors,
)
from dspark_trt.builder.checkpoint.tensor_file import StoredTensor
from dspark_trt.builder.config import ConfigError, parse_configs
from safetensors.torch import load_file
from torch import Tensor

from tests.released import tiny_config, write_checkpoint, write_sparse, write_tensors

VARIANTS = ("v4", "v4.1")


def shards(checkpoint: Path, output: Path, tp_size: int, **options: Any) -> list[dict[str, Tensor]]:
    convert_checkpoint(checkpoint, output, tp_size=tp_size, **options)
    return [load_file(output / rank_file_name(rank)) for rank in range(tp_size)]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def dequantized(tensors: dict[str, Tensor], name: str, block: int) -> Tensor:
    """Float64 values of an FP8 weight, element by element from the definition of its scales."""
    weight, scale = tensors[f"{name}.weight"].double(), tensors[f"{name}.scale"].double()
    rows, columns = (torch.arange(size) // block for size in weight.shape)
    return weight * scale[rows][:, columns]


# Dimension along which the ranks' parts are put together again (spec section 7.1).
SPLIT = {"attn_sink": 0, "wq_b": 0, "wo_b": 1, "w1": 0, "w2": 1, "w3": 0}


def place(released: str) -> tuple[str, int | None, int | None]:
    """Name in the shards, place in the stack of experts, dimension that is split."""
    parts = released.replace("markov_w1", "embed").replace("markov_w2", "head").split(".")
    expert = int(parts.pop(parts.index("experts") + 1)) if "experts" in parts else None
    module = parts[-2] if parts[-1] in ("weight", "scale") else parts[-1]
    return ".".join(parts), expert, SPLIT.get(module)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_put_together_are_the_released_tensors(variant: str, tp_size: int, tmp_path: Path) -> None:
    """CK-1, CK-3: bit by bit, for one rank and for two, expert 0 and the last one included."""
    config = tiny_config(variant)
    released = write_checkpoint(tmp_path / "released", config)
    ranks = shards(tmp_path / "released", tmp_path / "shards", tp_size)
    seen = set()
    for name, expected in released.items():
        if name.endswith(("gate.bias_vl", "wo_a.scale")):
            continue
        model_name, expert, split = place(name)
        seen.add(model_name)
        if name.endswith("wo_a.weight"):
            found = torch.cat([rank[model_name] for rank in ranks])
            block = config["quantization_config"]["weight_block_size"][0]
            assert found.dtype == torch.bfloat16
            assert torch.equal(found.double(), dequantized(released, name.removesuffix(".weight"), block)), name
            continue
        parts = [rank[model_name] if expert is None else rank[model_name][expert] for rank in ranks]
        if split is None:
            assert all(torch.equal(as_bytes(part), as_bytes(parts[0])) for part in parts), name
        found = parts[0] if split is None else torch.cat(parts, split)
        if expected.dtype == torch.int64:
            assert found.dtype == torch.int32
            found = found.long()
        else:
            assert found.dtype == (torch.int8 if expected.itemsize == 1 else expected.dtype), name
        assert torch.equal(as_bytes(found), as_bytes(expected)), name
    assert all(set(rank) == seen for rank in ranks)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_released_tensor_is_read_once(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-1: consumed exactly once each, by counting; the writer counts the other side."""
    released = write_checkpoint(tmp_path / "released", tiny_config(variant))
    reads: Counter[str] = Counter()
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: (reads.update([self.name]), read(self))[1])
    steps: list[int] = []
    convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=2, on_progress=steps.append)
    assert reads == Counter(released.keys())
    assert sum(steps) == sum(tensor.nbytes for tensor in released.values())
    assert sum(steps) == plan_conversion(tmp_path / "released", tp_size=2).source_bytes


def test_plan_announces_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4"))
    plan = plan_conversion(tmp_path / "released", tp_size=2)
    ranks = shards(tmp_path / "released", tmp_path / "shards", 2)
    sizes = [(tmp_path / "shards" / rank_file_name(rank)).stat().st_size for rank in range(2)]
    assert sizes == [plan.rank_file_bytes] * 2
    assert plan.output_bytes == sum(sizes)
    assert {name: tuple(t.shape) for name, t in ranks[1].items()} == {n: i.shape for n, i in plan.rank_tensors.items()}


def test_draft_only_is_the_draft_of_the_whole(tmp_path: Path) -> None:
    """CK-9: the shared tensors are the target's, byte for byte."""
    released = write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    (whole,) = shards(tmp_path / "released", tmp_path / "whole", 1)
    (draft,) = shards(tmp_path / "released", tmp_path / "draft", 1, draft_only=True)
    assert set(draft) == {name for name in whole if name.split(".")[0] in ("mtp", "embed", "head")}
    assert all(torch.equal(as_bytes(draft[name]), as_bytes(whole[name])) for name in draft)
    assert torch.equal(draft["embed.weight"], released["embed.weight"])
    assert read_shard_config(tmp_path / "draft").target is None
    assert read_shard_config(tmp_path / "whole").target == parse_configs(tiny_config("v4.1"))[0]


def test_scale_bytes_keep_their_meaning(tmp_path: Path) -> None:
    """CK-5, CK-6: a scale multiplies; 0 is 2^-127 and 254 is 2^127; one block differs from the others."""
    config = tiny_config("v4.1")
    scale = torch.full((8, 4), 127, dtype=torch.uint8)
    scale[0, 0], scale[1, 0], scale[2, 0], scale[0, 1] = 0, 1, 254, 130
    one = torch.ones(256, 128).to(torch.float8_e4m3fn)
    replace = {"mtp.1.attn.wo_a.weight": one, "mtp.1.attn.wo_a.scale": scale.view(torch.float8_e8m0fnu)}
    write_checkpoint(tmp_path / "released", config, replace=replace)
    (shard,) = shards(tmp_path / "released", tmp_path / "shards", 1)
    values = shard["mtp.1.attn.wo_a.weight"].float()[::32, ::32]
    expected = torch.ones(8, 4)
    expected[0, 0], expected[1, 0], expected[2, 0], expected[0, 1] = 2.0**-127, 2.0**-126, 2.0**127, 8.0
    assert torch.equal(values, expected)


@pytest.mark.parametrize(
    "name",
    ["mtp.0.main_proj.scale", "mtp.2.ffn.experts.3.w2.scale", "layers.1.attn.wo_a.scale", "mtp.1.attn.wkv.scale"],
)
def test_a_scale_that_is_not_a_number_is_refused(name: str, tmp_path: Path) -> None:
    """CK-6: E8M0 byte 255."""
    config = tiny_config("v4.1")
    tensors = write_checkpoint(tmp_path / "released", config)
    tensors[name].view(torch.uint8)[-1, -1] = 255
    write_tensors(tmp_path / "released", tensors)
    with pytest.raises(CheckpointError, match=f"{name}: 1 of {tensors[name].numel()} scales are E8M0 byte 255"):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["released"]


@pytest.mark.parametrize(("code", "byte"), [(0x7F, 127), (0x7E, 254), (0x01, 0)])
def test_wo_a_values_beyond_bf16_are_refused(code: int, byte: int, tmp_path: Path) -> None:
    """NaN, 448 x 2^127 and 2^-9 x 2^-127 have no BF16 value."""
    config = tiny_config("v4.1")
    name = "mtp.0.attn.wo_a"
    tensors = write_checkpoint(tmp_path / "released", config)
    tensors[f"{name}.weight"].view(torch.uint8)[0, 0] = code
    tensors[f"{name}.scale"].view(torch.uint8)[0, 0] = byte
    write_tensors(tmp_path / "released", tensors)
    with pytest.raises(CheckpointError, match=f"{name}.weight: holds values that BF16 can't hold"):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=1)


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_hash_table_with_experts_that_do_not_exist_is_refused(expert: int, tmp_path: Path) -> None:
    table = torch.zeros(320, 2, dtype=torch.int64)
    table[7, 1] = expert
    name = "layers.0.ffn.gate.tid2eid"
    write_checkpoint(tmp_path / "released", tiny_config("v4"), replace={name: table})
    with pytest.raises(
        CheckpointError, match=rf"{name}: holds expert ids {min(0, expert)}..{max(0, expert)}, expected 0..7"
    ):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=1)


def test_a_hash_table_may_be_32_bit(tmp_path: Path) -> None:
    table = torch.arange(640, dtype=torch.int32).reshape(320, 2) % 8
    name = "layers.0.ffn.gate.tid2eid"
    write_checkpoint(tmp_path / "released", tiny_config("v4"), replace={name: table})
    (shard,) = shards(tmp_path / "released", tmp_path / "shards", 1)
    assert torch.equal(shard[name], table)


def test_dimensions_that_end_in_a_partial_block(tmp_path: Path) -> None:
    """CK-5: head_dim 96 in blocks of 128 has ceil(96 / 128) scale rows; a rank must not cut such a block."""
    config = tiny_config("v4", head_dim=96, qk_rope_head_dim=32)
    released = write_checkpoint(tmp_path / "released", config)
    assert released["mtp.0.attn.wkv.scale"].shape == (1, 2)
    assert released["mtp.0.attn.wo_a.scale"].shape == (4, 2)
    for tp_size in (1, 2):
        ranks = shards(tmp_path / "released", tmp_path / f"shards{tp_size}", tp_size)
        wo_a = torch.cat([rank["mtp.0.attn.wo_a.weight"] for rank in ranks])
        assert torch.equal(wo_a.double(), dequantized(released, "mtp.0.attn.wo_a", 128))
        assert ranks[0]["mtp.0.attn.wkv.scale"].shape == (1, 2)
    with pytest.raises(ConfigError, match="does not split into whole quantisation blocks"):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards4", tp_size=4)


def test_hash_does_not_depend_on_files_or_ranks(tmp_path: Path) -> None:
    config = tiny_config("v4.1")

    def weights_hash(name: str, tp_size: int = 1, shard_count: int = 2, **options: Any) -> str:
        write_checkpoint(tmp_path / name, config, shards=shard_count, **options)
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-shards", tp_size=tp_size)
        return read_shard_config(tmp_path / f"{name}-shards").weights_hash

    first = weights_hash("a")
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert weights_hash("b", tp_size=2) == first
    assert weights_hash("c", shard_count=1) == first
    assert weights_hash("d", shard_count=5) == first
    assert weights_hash("e", seed=1) != first
    bias = torch.zeros(4)
    assert weights_hash("f", replace={"mtp.0.ffn.gate.bias": bias}) != weights_hash(
        "g", replace={"mtp.1.ffn.gate.bias": bias}
    )


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    (tmp_path / "released" / "tokenizer.json").write_text("{}")
    convert_checkpoint(tmp_path / "released", tmp_path / "deep" / "shards", tp_size=1)
    files = sorted(path.name for path in (tmp_path / "deep" / "shards").iterdir())
    assert files == ["config.json", "rank0.safetensors", "tokenizer.json"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["shards"]


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    steps = []

    def interrupt(done: int) -> None:
        steps.append(done)
        # Under another name, so that nobody takes it for a finished directory.
        assert not (tmp_path / "shards").exists()
        if len(steps) == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=2, on_progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["released"]


def test_a_shard_truncated_before_the_end_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    file = tmp_path / "released" / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: truncated or damaged"):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["released"]


def test_an_output_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    output = tmp_path / "shards"
    output.mkdir()
    convert_checkpoint(tmp_path / "released", output, tp_size=1)
    before = (output / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="shards: exists already; remove it or pass another --output"):
        convert_checkpoint(tmp_path / "released", output, tp_size=2)
    assert (output / "config.json").read_bytes() == before


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that comes after the first tensor was read is no refusal in time."""

    def read(self: StoredTensor) -> Tensor:
        raise AssertionError("read before the output was checked")

    monkeypatch.setattr(StoredTensor, "read", read)


@pytest.mark.usefixtures("unread")
def test_an_output_that_cannot_be_replaced_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty volume: the renaming would fail when everything is done, and what was written would be removed."""
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    output = tmp_path / "volume"
    output.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: Path(path) == output)
        with pytest.raises(CheckpointError) as error:
            convert_checkpoint(tmp_path / "released", output, tp_size=1)
    assert str(error.value) == (
        f"{output}: is a mount point, which can't be replaced by the finished directory; pass a new one in it, such as "
        f"--output {output}/new"
    )
    (tmp_path / "link").symlink_to(output)
    with pytest.raises(CheckpointError, match=r"link: is a symbolic link, which can't be replaced"):
        convert_checkpoint(tmp_path / "released", tmp_path / "link", tp_size=1)
    monkeypatch.chdir(output)
    with pytest.raises(CheckpointError, match=r"^\.: is the current directory, which .* such as --output new$"):
        convert_checkpoint(tmp_path / "released", Path(), tp_size=1)


@pytest.mark.usefixtures("unread")
def test_an_output_that_cannot_be_made_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"file/x: .*/file is a file, expected a directory; pass another --output"
    ):
        convert_checkpoint(tmp_path / "released", tmp_path / "file" / "x", tp_size=1)
    partial = tmp_path / f".x.partial-{os.getpid()}"
    partial.mkdir()
    with pytest.raises(CheckpointError, match=r"partial-\d+: exists already, left by a run that was killed; remove it"):
        convert_checkpoint(tmp_path / "released", tmp_path / "x", tp_size=1)
    assert partial.is_dir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(
            CheckpointError, match=r"can't be made \(Read-only file system\); pass an --output where you"
        ):
            convert_checkpoint(tmp_path / "released", tmp_path / "deep" / "x", tp_size=1)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(CheckpointError, match=rf"x: {tmp_path} is not writable for this user; pass an --output where"):
        convert_checkpoint(tmp_path / "released", tmp_path / "deep" / "x", tp_size=1)


def test_a_directory_that_another_process_is_making_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both would do all the work, and one would lose it. What a killed process left is named, and nothing more."""
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        partial = tmp_path / f".x.partial-{other.pid}"
        partial.mkdir()
        with pytest.raises(CheckpointError, match=rf"x: process {other.pid} is making it, in .*; wait for it, or pass"):
            convert_checkpoint(tmp_path / "released", tmp_path / "x", tp_size=1)
    with caplog.at_level(logging.WARNING, logger="dspark_trt"):
        convert_checkpoint(tmp_path / "released", tmp_path / "x", tp_size=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{partial} was left by a process that does not run any more; remove it"
    ]
    assert partial.is_dir() and (tmp_path / "x").is_dir()


def test_what_is_complete_is_kept_where_its_name_was_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))

    def take(_: int) -> None:
        (tmp_path / "x" / "of somebody else").mkdir(parents=True, exist_ok=True)

    with pytest.raises(
        CheckpointError, match=r"x: another directory took its place meanwhile .* is complete in .*, re"
    ):
        convert_checkpoint(tmp_path / "released", tmp_path / "x", tp_size=1, on_progress=take)
    kept = tmp_path / f".x.partial-{os.getpid()}"
    kept.rename(tmp_path / "y")
    assert read_shard_config(tmp_path / "y").tp_size == 1
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["of somebody else"]


def test_rank_files_are_recorded_with_their_hashes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=2)
    for name, facts in read_shard_config(tmp_path / "shards").rank_files.items():
        data = (tmp_path / "shards" / name).read_bytes()
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_disk_that_is_too_small_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    plan = plan_conversion(tmp_path / "released", tp_size=1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": plan.output_bytes - 1}))
    with pytest.raises(
        CheckpointError, match=f"{plan.output_bytes} bytes are needed and {plan.output_bytes - 1} are free"
    ):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=1)


@pytest.mark.parametrize("tp_size", [0, 3, 8])
def test_sizes_that_do_not_split_are_refused(tp_size: int, tmp_path: Path) -> None:
    """TP-12, through the converter."""
    write_checkpoint(tmp_path / "released", tiny_config("v4.1"))
    with pytest.raises(ConfigError, match=rf"size {tp_size} is not possible.*\[1, 2, 4\]"):
        convert_checkpoint(tmp_path / "released", tmp_path / "shards", tp_size=tp_size)


CONVERT = """
import sys
from pathlib import Path
from dspark_trt.builder.checkpoint import convert_checkpoint

def peak_resident():
    # Not ru_maxrss: that one starts from the process which started this one, and survives exec.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024

print(peak_resident())
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), tp_size=2)
print(peak_resident())
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Peak resident memory stays below twice the largest tensor plus 1 GB, Python and torch included.

    The checkpoint is larger than that bound, so reading it whole, or mapping it (mapped pages count as
    resident), would break it. Its data are holes: zeros, which are weights and scales like any other.
    """
    config = tiny_config(
        "v4.1", hidden_size=1024, moe_intermediate_size=1024, n_routed_experts=64, vocab_size=32768,
        dspark_n_routed_experts=128, num_hidden_layers=8, compress_ratios=[0] * 8, dspark_noise_token_id=9,
    )  # fmt: skip
    target, draft = parse_configs(config)
    tensors = {name: (entry.dtypes[0], entry.shape) for name, entry in released_tensors(target, draft).items()}
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    write_sparse(tmp_path / "released" / "model.safetensors", tensors)
    plan = plan_conversion(tmp_path / "released", tp_size=2)
    bound = 2 * max(tensor.nbytes for tensor in plan.stored.values()) + 10**9
    assert plan.source_bytes > 1.2 * bound
    command = [sys.executable, "-c", CONVERT, str(tmp_path / "released"), str(tmp_path / "shards")]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    before, peak = map(int, result.stdout.split())
    assert peak < bound, f"{peak / 1e6:.0f} MB, allowed {bound / 1e6:.0f} MB"
    # The tables of these 5,400 tensors, and libraries that are loaded late, take about 50 MB.
    assert peak - before < plan.peak_memory_bytes + 5e7
