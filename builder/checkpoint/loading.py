"""Rank shards: the directory that conversion writes, and filling a model from it.

The directory holds ``config.json``, one ``rank{r}.safetensors`` per rank, and the tokenizer's files. Tensors
carry the names of the model's state dict; quantised weights keep their released bytes, so the same shard
serves both numerics: a ``released`` model has integer parameters for bytes and scales, a ``dequantized``
one has floating-point weights and no scales, which are dequantised here, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...plugins.numerics import FP4_BLOCK
from ..config import DraftConfig, TargetConfig, networks_from_dict, to_dict
from ..directories import CONFIG_NAME, SHARD_FORMAT, file_problems, read_dir_header
from ..json_values import read_value
from .quantization import dequantize_fp4, dequantize_fp8, scale_shape
from .tensor_file import CheckpointError, DamagedWeightsError, StoredTensor, file_sha256, read_header

SHARD_VERSION = 2
"""Raised whenever shards of an older package would be read wrongly."""
RECONVERT = "run dspark-convert again"
REMAKE = "copy it again, or run dspark-convert (and dspark-build) again"

_FILE: Any = {"bytes": int, "sha256": str}
_KEYS: dict[str, Any] = {
    "version": int,
    "format": str,
    "target": Any,
    "draft": Any,
    "mapping": {"tp_size": int},
    "weights_hash": str,
    "rank_files": Mapping[str, _FILE],
}

_WIDENINGS = {(torch.bfloat16, torch.float32), (torch.int32, torch.int64)}


def rank_file_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """What a shard directory holds."""

    target: TargetConfig | None
    """None when the draft alone was converted."""
    draft: DraftConfig
    tp_size: int
    weights_hash: str
    """SHA-256 over all released tensors that were read, however they were spread over files."""
    rank_files: Mapping[str, Mapping[str, Any]]
    """File name -> its size, ``bytes``, and ``sha256``."""

    def write(self, directory: Path) -> None:
        """Write ``config.json``; :func:`read_shard_config` is the inverse."""
        values = {
            "version": SHARD_VERSION,
            "format": SHARD_FORMAT,
            "target": to_dict(self.target) if self.target else None,
            "draft": to_dict(self.draft),
            "mapping": {"tp_size": self.tp_size},
            "weights_hash": self.weights_hash,
            "rank_files": dict(self.rank_files),
        }
        (directory / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")


def read_shard_config(directory: Path) -> ShardConfig:
    """The configuration of a shard directory whose rank files are all there and complete.

    Raises:
        CheckpointError: listing what is wrong with the directory, and to convert again.
    """
    values = read_dir_header(directory, "shards", SHARD_VERSION, CheckpointError, remedy=RECONVERT, outdated=RECONVERT)
    problems: list[str] = []
    values = read_value(_KEYS, values, "", problems)
    configs = networks_from_dict(values, problems)
    if problems:
        header = directory / CONFIG_NAME
        raise CheckpointError(f"{header}: not a shard configuration: {'; '.join(problems)}; {RECONVERT}")
    tp_size, files = values["mapping"]["tp_size"], values["rank_files"]
    config = ShardConfig(**configs, tp_size=tp_size, weights_hash=values["weights_hash"], rank_files=files)
    expected = [rank_file_name(rank) for rank in range(tp_size)]
    if tp_size < 1 or sorted(files) != sorted(expected):
        problems.append(f"lists {sorted(files)}, tensor parallel size {tp_size} needs {expected}")
    if problems := problems + file_problems(directory, files):
        raise CheckpointError(f"{directory}: {'; '.join(problems)}; {RECONVERT}")
    return config


def rank_file_facts(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What :attr:`ShardConfig.rank_files` says of files, from reading them."""
    names = list(names)
    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter to other threads
        digests = pool.map(lambda name: file_sha256(directory / name), names)
        return {
            name: {"bytes": (directory / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, digests, strict=True)
        }


def check_rank_files(directory: Path, config: ShardConfig, names: Iterable[str]) -> None:
    """Raise :class:`DamagedWeightsError` unless the files hold what dspark-convert wrote; reads all of them."""
    found = rank_file_facts(directory, names)
    if damaged := [
        f"{name} has sha256 {facts['sha256'][:12]}..., {config.rank_files[name]['sha256'][:12]}... was written"
        for name, facts in found.items()
        if facts["sha256"] != config.rank_files[name]["sha256"]
    ]:
        raise DamagedWeightsError(f"{directory}: damaged weights: {'; '.join(damaged)}; {REMAKE}")


def load_shard(
    model: torch.nn.Module, path: Path, *, network: Literal["draft", "target"], check_bytes: bool = True
) -> None:
    """Fill every entry of ``model.state_dict()`` from a rank shard, each exactly once.

    Args:
        model: a network on real storage, on any device. Weights that it holds as floating-point numbers
            where the shard has bytes are dequantised in float32 and rounded once to the parameter's dtype.
        path: ``rank{r}.safetensors`` in a shard directory.
        network: takes the tensors that :func:`is_part` says.
        check_bytes: compare the whole file with what was written; False where that was done already.

    Raises:
        CheckpointError: the file is damaged; or listing every tensor that the shard or the model lacks, that differs
            in shape, or that the model would hold in a narrower dtype without being a dequantised model; or naming a
            tensor whose values overflow the parameter's dtype. Nothing is written before all names and
            shapes agree.
    """
    config = read_shard_config(path.parent)
    if check_bytes:
        check_rank_files(path.parent, config, [path.name])
    block = config.draft.weight_block_size
    stored = {name: t for name, t in read_header(path, REMAKE).items() if is_part(name, network)}
    parameters = model.state_dict()
    scales = {
        name: name.removesuffix(".weight") + ".scale"
        for name, parameter in parameters.items()
        if name in stored and stored[name].dtype == "I8" and parameter.is_floating_point()
    }
    if problems := [*_differences(parameters, stored, scales, block)]:
        raise CheckpointError("\n".join([f"{path}: the shard does not fit the {network} model", *problems]))
    for name in sorted(parameters, key=lambda n: stored[n].offset):
        source, parameter = stored[name].read(), parameters[name]
        if name not in scales:
            parameter.copy_(source)
        elif is_fp4(name):
            # One expert at a time: the float32 values of all would be eight times the stored bytes.
            for expert, packed, scale in zip(parameter, source, stored[scales[name]].read(), strict=True):
                expert.copy_(dequantize_fp4(packed, scale))
        else:
            parameter.copy_(dequantize_fp8(source, stored[scales[name]].read(), block))
        if scales and parameter.dtype == torch.float16 and not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{path}: {name} has values beyond float16's 65504; use bfloat16 or float32")


def is_part(name: str, network: Literal["draft", "target"]) -> bool:
    """Whether a tensor of a rank shard belongs to ``network``; embedding and head belong to both."""
    owner = name.split(".")[0]
    return owner in ("mtp", "embed", "head") if network == "draft" else owner != "mtp"


def is_fp4(name: str) -> bool:
    """Whether ``name`` is a weight of the routed experts; shared experts are FP8."""
    return "experts" in name.split(".")


def _differences(
    parameters: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], scales: Mapping[str, str], block: int
) -> Iterator[str]:
    wanted = {*parameters, *scales.values()}
    if missing := sorted(wanted - set(stored)):
        yield f"{len(missing)} missing from the shard: {', '.join(missing)}"
    if extra := sorted(set(stored) - wanted):
        yield f"{len(extra)} without a place in the model: {', '.join(extra)}"
    for name in sorted(parameters.keys() & stored.keys()):
        source, parameter, scale = stored[name], parameters[name], stored.get(scales.get(name, ""))
        shape = source.shape
        if parameter.is_meta:
            yield f"{name} is on the meta device, which holds no values; create the model on a real device"
        if name not in scales:
            if not _converts(source, parameter, dequantized=bool(scales)):
                yield f"{name} is {source.dtype} in the shard, the model's {parameter.dtype} can't hold it"
        elif is_fp4(name):
            shape = (*shape[:-1], 2 * shape[-1])
            scaled, kind = (*shape[:-1], shape[-1] // FP4_BLOCK), "FP4"
        else:
            scaled, kind = scale_shape(shape, block), "FP8"
        if scale and scale.shape != scaled:
            yield f"{scale.name} has shape {[*scale.shape]}, {kind} weights of shape {[*shape]} need {[*scaled]}"
        if tuple(parameter.shape) != shape:
            yield f"{name} has shape {[*shape]} in the shard, {[*parameter.shape]} in the model"


def _converts(source: StoredTensor, parameter: Tensor, *, dequantized: bool) -> bool:
    """Same dtype or an exact widening; a dequantised model may also round to its own 16-bit dtype."""
    pair = (source.torch_dtype, parameter.dtype)
    rounded = dequantized and pair[0].is_floating_point and pair[1] in (torch.float16, torch.bfloat16)
    return pair[0] == pair[1] or pair in _WIDENINGS or rounded
