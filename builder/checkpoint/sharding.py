"""Conversion of a released checkpoint into one file per rank.

Everything is known before the first tensor is read: the table of released tensors gives the layout of every
rank file. So all rank files are open at once, and the released tensors pass through one by one in the order
in which they lie on disk: read, checked, hashed, cut, written. Experts go to their place in the stacked
tensor. Memory holds one released tensor and what is cut from it, however large the checkpoint is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..config import DraftConfig, TargetConfig, read_configs
from ..directories import check_new, new_directory
from .index import Checkpoint
from .loading import ShardConfig, rank_file_facts, rank_file_name
from .names import TensorEntry, check_tensors, count_stages, released_tensors
from .quantization import check_scale, dequantize_fp8
from .tensor_file import CheckpointError, StoredTensor, TensorFileWriter, TensorInfo, file_size, tensor_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_SHARD_DTYPES = {"F8_E4M3": "I8", "F8_E8M0": "I8", "I64": "I32"}
_DEQUANTIZE_BYTES = 16
"""Memory for each element of a weight while it becomes BF16: code, two float32 and their temporaries."""


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """What a conversion reads and writes; sizes in bytes."""

    checkpoint: Path
    target: TargetConfig | None
    draft: DraftConfig
    tp_size: int
    entries: Mapping[str, TensorEntry]
    stored: Mapping[str, StoredTensor]
    rank_tensors: Mapping[str, TensorInfo]
    """Contents of each rank's file; all ranks have the same shapes."""

    @property
    def source_bytes(self) -> int:
        """What is read; the steps that ``on_progress`` reports add up to it."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def rank_file_bytes(self) -> int:
        return file_size(self.rank_tensors)

    @property
    def output_bytes(self) -> int:
        return self.tp_size * self.rank_file_bytes

    @property
    def peak_memory_bytes(self) -> int:
        """The most that tensors take at a time, beside the interpreter and its libraries."""
        return max(
            tensor.nbytes * (_DEQUANTIZE_BYTES if self.entries[name].scale else 2)
            for name, tensor in self.stored.items()
        )


def plan_conversion(
    checkpoint: Path, *, tp_size: int, draft_only: bool = False, allow_keys: Iterable[str] = ()
) -> ConversionPlan:
    """What :func:`convert_checkpoint` would do; reads ``config.json``, the index and the shards' headers.

    Raises:
        ConfigError: when ``config.json`` can't be used, or its sizes don't split over ``tp_size``.
        CheckpointError: when files or tensors are missing, damaged, unknown or unlike ``config.json``.
    """
    source = Checkpoint(checkpoint)
    stages = count_stages(source.files)
    target, draft = read_configs(checkpoint, num_stages=stages, allow_keys=allow_keys)
    if not draft_only and (layers := [i for i, ratio in enumerate(target.compress_ratios) if ratio]):
        raise CheckpointError(
            f"{checkpoint}: {len(layers)} target layers have compressed attention (the first is layer {layers[0]}), "
            "which this version does not build; pass --draft-only to convert the draft alone"
        )
    entries = released_tensors(None if draft_only else target, draft)
    stored = source.find(entries)
    check_tensors(entries, stored, source.files, draft=draft, draft_only=draft_only)
    for config in (draft,) if draft_only else (draft, target):
        config.check_tensor_parallel(tp_size)
    return ConversionPlan(
        checkpoint=checkpoint,
        target=None if draft_only else target,
        draft=draft,
        tp_size=tp_size,
        entries=entries,
        stored=stored,
        rank_tensors=_rank_tensors(entries, tp_size),
    )


def convert_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    tp_size: int,
    draft_only: bool = False,
    allow_keys: Iterable[str] = (),
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write the rank shards of a released checkpoint to the new directory ``output``.

    The directory gets its name when it is complete; an interrupted conversion leaves nothing under it.

    Args:
        checkpoint: directory with ``config.json`` and safetensors.
        output: must not exist, or be an empty directory that can be replaced.
        tp_size: number of ranks, one file each.
        draft_only: leave the target out, also where this package can't build it.
        allow_keys: unknown keys of ``config.json`` to pass over.
        on_progress: called with the bytes of each tensor that was read.

    Raises:
        ConfigError, CheckpointError: as :func:`plan_conversion`, or when ``output`` is in use, the disk is
            too small, or a tensor holds values that can't be right.
    """
    check_new(output, CheckpointError)
    plan = plan_conversion(checkpoint, tp_size=tp_size, draft_only=draft_only, allow_keys=allow_keys)
    write_shards(plan, output, on_progress)


def write_shards(plan: ConversionPlan, output: Path, on_progress: Callable[[int], None] | None = None) -> None:
    """:func:`convert_checkpoint` where the plan is made already."""
    with new_directory(output, CheckpointError) as partial:
        if (free := shutil.disk_usage(partial).free) < plan.output_bytes:
            raise CheckpointError(
                f"{output}: {plan.output_bytes} bytes are needed and {free} are free; pass another --output"
            )
        digest = _write_rank_files(plan, partial, on_progress or (lambda done: None))
        ShardConfig(
            target=plan.target,
            draft=plan.draft,
            tp_size=plan.tp_size,
            weights_hash=digest,
            # Read once more: the tensors came in another order than they lie in.
            rank_files=rank_file_facts(partial, [rank_file_name(rank) for rank in range(plan.tp_size)]),
        ).write(partial)
        for name in TOKENIZER_FILES:
            if (plan.checkpoint / name).is_file():
                shutil.copyfile(plan.checkpoint / name, partial / name)


def _rank_tensors(entries: Mapping[str, TensorEntry], tp_size: int) -> dict[str, TensorInfo]:
    counts = Counter(entry.model_name for entry in entries.values() if entry.expert is not None)
    folded = {entry.scale for entry in entries.values()}
    tensors = {}
    for name, entry in entries.items():
        if entry.model_name is None or name in folded:
            continue
        shape = tuple(size // tp_size if i == entry.split else size for i, size in enumerate(entry.shape))
        if entry.expert is not None:
            shape = (counts[entry.model_name], *shape)
        dtype = "BF16" if entry.scale else _SHARD_DTYPES.get(entry.dtypes[0], entry.dtypes[0])
        tensors[entry.model_name] = TensorInfo(dtype, shape)
    return tensors


def _write_rank_files(plan: ConversionPlan, directory: Path, on_progress: Callable[[int], None]) -> str:
    """Write all rank files and return the hash of the released tensors."""
    digests: dict[str, bytes] = {}

    def read(name: str) -> Tensor:
        source = plan.stored[name]
        tensor = source.read()
        digest = hashlib.sha256(json.dumps([name, source.dtype, source.shape]).encode())
        digest.update(tensor_bytes(tensor))
        digests[name] = digest.digest()
        if source.dtype == "F8_E8M0":
            check_scale(name, tensor)
        on_progress(source.nbytes)
        return tensor

    folded = {entry.scale for entry in plan.entries.values()}
    in_file_order = sorted(plan.stored, key=lambda n: (plan.stored[n].path, plan.stored[n].offset))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(TensorFileWriter(directory / rank_file_name(rank), plan.rank_tensors))
            for rank in range(plan.tp_size)
        ]
        for name in in_file_order:
            if name in folded:
                continue
            entry, tensor = plan.entries[name], read(name)
            if entry.model_name is None:
                continue
            if entry.scale:
                tensor = _to_bfloat16(name, dequantize_fp8(tensor, read(entry.scale), plan.draft.weight_block_size))
            elif "I64" in entry.dtypes:
                tensor = _to_expert_ids(name, tensor, plan)
            parts = [tensor] * plan.tp_size if entry.split is None else tensor.chunk(plan.tp_size, entry.split)
            for writer, part in zip(writers, parts, strict=True):
                writer.write(entry.model_name, part, entry.expert)
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _to_expert_ids(name: str, table: Tensor, plan: ConversionPlan) -> Tensor:
    experts = plan.target.n_routed_experts if plan.target else 0
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= experts:
        raise CheckpointError(
            f"{name}: holds expert ids {low}..{high}, expected 0..{experts - 1}; download the checkpoint again"
        )
    return table.to(torch.int32)


def _to_bfloat16(name: str, values: Tensor) -> Tensor:
    """``values`` in BF16, which holds an FP8 code times a power of two exactly unless the scale is absurd."""
    rounded = values.to(torch.bfloat16)
    if not (torch.equal(rounded.float(), values) and bool(values.isfinite().all())):
        raise CheckpointError(f"{name}: holds values that BF16 can't hold exactly; download the checkpoint again")
    return rounded
