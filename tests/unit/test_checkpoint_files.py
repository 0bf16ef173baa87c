"""Safetensors files and the index: what is damaged is found before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dspark_trt.builder.checkpoint import Checkpoint, CheckpointError
from dspark_trt.builder.checkpoint.tensor_file import TensorFileWriter, TensorInfo, file_size, read_header
from safetensors import safe_open
from safetensors.torch import save_file

from tests.released import write_index, write_tensors

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.arange(-3, 4, dtype=torch.int8),
    "d": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "e": torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
    "f": torch.tensor([0, 127, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
}
DTYPES = {"a": "F32", "b": "BF16", "c": "I8", "d": "I64", "e": "F8_E4M3", "f": "F8_E8M0"}


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
    return found.shape == expected.shape and torch.equal(*flat)


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: tensor.dtype for name, tensor in header.items()} == DTYPES
    assert all(same_bytes(tensor.read(), TENSORS[name]) for name, tensor in header.items())


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    """In any order, whole or entry by entry, at the size that was announced."""
    info = {name: TensorInfo(DTYPES[name], tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    path = tmp_path / "x.safetensors"
    with TensorFileWriter(path, info) as writer:
        for row in (2, 0, 1):
            writer.write("a", TENSORS["a"][row], row)
        for name in "fedcb":
            writer.write(name, TENSORS[name])
    assert path.stat().st_size == file_size(info)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(TENSORS)
        assert all(same_bytes(file.get_tensor(name), TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(("rows", "left"), [((0, 2), 16), ((0, 1, 2, 2), -16)])
def test_bytes_that_are_not_written_exactly_once_are_an_error(tmp_path: Path, rows: tuple[int, ...], left: int) -> None:
    """CK-1: a hole would be zeros, a second write would hide the first."""
    with (
        pytest.raises(CheckpointError, match=rf"'a': {left}"),
        TensorFileWriter(tmp_path / "x", {"a": TensorInfo("F32", (3, 4))}) as writer,
    ):
        for row in rows:
            writer.write("a", TENSORS["a"][row], row)


def cut_to(size: int) -> Callable[[Path], object]:
    """Keep the first ``size`` bytes, or all but the last ones when it is negative."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def corrupt(old: bytes, new: bytes) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))

    return apply


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_to(-1), "truncated or damaged at 119 bytes"),
        (cut_to(50), "truncated or damaged at 50 bytes"),
        (cut_to(4), "truncated or damaged at 4 bytes"),
        (cut_to(0), "truncated or damaged at 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "truncated or damaged at 121 bytes"),
        (lambda path: path.write_bytes(b"\xff" * 64), "header too large"),
        (lambda path: path.unlink(), "not found"),
        (corrupt(b'"dtype"', b'"dtipe"'), "missing field `dtype`"),
        (corrupt(b'"F32"', b'"F4M"'), "unknown variant `F4M`"),
        (corrupt(b'{"a"', b'["a"'), "invalid JSON in header"),
        (corrupt(b'"shape":[3,4]', b'"shape":[3,5]'), "invalid shape"),
        (corrupt(b"[0,48]", b"[4,48]"), "invalid offset for tensor `a`"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    assert path.stat().st_size == 120
    read_header(path)
    damage(path)
    with pytest.raises(CheckpointError, match=problem) as error:
        read_header(path)
    assert str(error.value).startswith(str(path))
    assert "download the file again" in str(error.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    last = max(header.values(), key=lambda tensor: tensor.offset)
    cut_to(-1)(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"{last.name} ends after {last.nbytes - 1} of {last.nbytes} bytes"):
        last.read()


def test_a_dtype_that_no_release_has_is_named_when_the_tensor_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.float64)}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["a"]
    with pytest.raises(CheckpointError, match="a has dtype F64, expected one of"):
        tensor.read()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_tensors_are_found_in_their_shards(tmp_path: Path, shards: int) -> None:
    write_tensors(tmp_path, TENSORS, shards=shards)
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.files) == sorted(TENSORS)
    found = checkpoint.find([*TENSORS, "not there"])
    assert sorted(found) == sorted(TENSORS)
    assert all(same_bytes(tensor.read(), TENSORS[name]) for name, tensor in found.items())


def test_shards_without_wanted_tensors_are_not_opened(tmp_path: Path) -> None:
    """A draft of a few gigabytes is read although the target's shards were never downloaded."""
    write_tensors(tmp_path, TENSORS, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.find("ace")) == ["a", "c", "e"]
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: not found"):
        checkpoint.find("ab")


def test_every_missing_and_damaged_shard_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    cut_to(-1)(tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)00001-of-00003.*not found.*00003-of-00003.*truncated"):
        Checkpoint(tmp_path).find(TENSORS)


@pytest.mark.parametrize(
    ("held", "weight_map", "problem"),
    [
        ({"x": "ab", "y": "c"}, {"a": "x", "b": "x", "c": "y", "d": "y"}, "d is not in y, where the index places it"),
        ({"x": "ab", "y": "cd"}, {"a": "x", "b": "x", "c": "y"}, "d is in y, the index says nothing of it"),
        ({"x": "ab", "y": "bc"}, {"a": "x", "b": "x", "c": "y"}, "b is in two shards, x and y"),
        ({"x": "ab", "y": "c"}, {"a": "x", "b": "y", "c": "y"}, "b is in x, the index says y"),
    ],
)
def test_index_and_shards_must_agree(
    tmp_path: Path, held: dict[str, str], weight_map: dict[str, str], problem: str
) -> None:
    for file, names in held.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=problem):
        Checkpoint(tmp_path).find("abc")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (None, "holds neither model.safetensors.index.json nor model.safetensors"),
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        (json.dumps({"metadata": {}}), "not a safetensors index"),
        (json.dumps({"weight_map": ["a"]}), "not a safetensors index"),
        (json.dumps({"weight_map": {"a": 1}}), "not a safetensors index"),
        (json.dumps({"weight_map": {"a": "../x"}}), "plain file names, found \\['../x'\\]"),
    ],
)
def test_a_directory_without_a_usable_index_is_refused(tmp_path: Path, index: str | None, problem: str) -> None:
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=problem):
        Checkpoint(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: not a directory; --checkpoint wants"):
        Checkpoint(tmp_path / "nowhere")
