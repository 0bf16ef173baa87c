"""Safetensors files, read and written one tensor at a time.

The safetensors library checks files, but it maps them to read, so that every page it touches counts as
resident memory, and it writes from tensors that are all in memory. For checkpoints of hundreds of
gigabytes a :class:`StoredTensor` reads its own bytes when asked, and a :class:`TensorFileWriter` lays the
file out from names, dtypes and shapes first and takes the bytes in any order afterwards.

FP8, FP4 and E8M0 tensors are bytes: they are read as ``torch.int8``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.int8,
    "F8_E8M0": torch.int8,
}


HASH_BYTES = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint or a rank shard is incomplete, damaged or not what its configuration says."""


class DamagedWeightsError(CheckpointError):
    """A rank file holds other bytes than dspark-convert wrote."""


class TensorInfo(NamedTuple):
    """Dtype (a safetensors name) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; ``offset`` counts bytes from the start of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in _TORCH_DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.name} has dtype {self.dtype}, expected one of {[*_TORCH_DTYPES]}; take the file "
                "of the release, not a converted copy"
            )
        return _TORCH_DTYPES[self.dtype]

    def read(self) -> Tensor:
        """The tensor, in memory of its own.

        Raises:
            CheckpointError: for a dtype that no released checkpoint has, or a file that got shorter.
        """
        dtype = self.torch_dtype
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if (got := file.readinto(data.numpy().data)) != self.nbytes:
                raise CheckpointError(
                    f"{self.path}: {self.name} ends after {got} of {self.nbytes} bytes; copy or download the file again"
                )
        return data.view(dtype).reshape(self.shape)


def read_header(path: Path, remedy: str = "download the file again") -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, none of them read yet; ``remedy`` ends the message of a damaged one.

    Raises:
        CheckpointError: when the file is missing, empty, truncated or not what its header describes.
    """
    try:
        # Opening compares the header with the size of the file, and shapes with the room they have.
        # Its own errors don't tell a file that may not be read from one that is not there.
        with path.open("rb") as file, safe_open(path, "pt"):
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; {remedy}") from None
    except PermissionError as error:
        raise _unreadable(path, error) from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path}: truncated or damaged at {size} bytes ({error}); {remedy}") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(path, name, entry["dtype"], shape, offset=8 + length + begin, nbytes=end - begin)
    return tensors


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read piece by piece: memory does not grow with it.

    Raises:
        CheckpointError: when it can't be read.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: can't be read ({error.strerror}); make it readable for this user")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class TensorFileWriter:
    """Writes a safetensors file whose tensors arrive in any order, whole or entry by entry.

    As a context manager it checks at the end that every byte of every tensor was written once.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]):
        header, self._offsets = _layout(tensors)
        self._path = path
        self._left = {name: info.nbytes for name, info in tensors.items()}
        self._file = path.open("wb")
        self._file.write(header)

    def write(self, name: str, data: Tensor, entry: int | None = None) -> None:
        """Write tensor ``name``, or its slice ``entry`` along the first dimension."""
        data = data.contiguous()
        self._left[name] -= data.nbytes
        self._file.seek(self._offsets[name] + (entry or 0) * data.nbytes)
        self._file.write(tensor_bytes(data))

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._file.close()
        wrong = {name: left for name, left in self._left.items() if left}
        if kind is None and wrong:
            raise CheckpointError(f"{self._path}: bytes left to write, below 0 where written twice: {wrong}")


def file_size(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of the file that a :class:`TensorFileWriter` makes of ``tensors``."""
    return len(_layout(tensors)[0]) + sum(info.nbytes for info in tensors.values())


def _layout(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The header and the file offset of each tensor; wide dtypes come first, so all are aligned."""
    order = sorted(tensors, key=lambda name: (-_TORCH_DTYPES[tensors[name].dtype].itemsize, name))
    entries, offsets, end = {}, {}, 0
    for name in order:
        dtype, shape = tensors[name]
        offsets[name], begin, end = end, end, end + tensors[name].nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    prefix = len(header).to_bytes(8, "little") + header
    return prefix, {name: offset + len(prefix) for name, offset in offsets.items()}
