"""The directory of a released checkpoint: which tensor lies in which file.

``model.safetensors.index.json`` maps names to shard files; a small checkpoint has a single
``model.safetensors`` instead. Only the files that hold wanted tensors are opened, and what they hold is
compared with the index in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..directories import INDEX_NAME, SINGLE_NAME, check_kind
from .tensor_file import CheckpointError, StoredTensor, read_header


class Checkpoint:
    """A released checkpoint directory. Opening it reads the index, no tensors.

    Raises:
        CheckpointError: when the directory or its index is missing or unreadable.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: not a directory; --checkpoint wants a released checkpoint directory")
        check_kind(directory, "released", CheckpointError)
        self.files = self._read_index()
        """Tensor name -> file name."""

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX_NAME
        if not path.exists():
            if not (self.directory / SINGLE_NAME).exists():
                raise CheckpointError(
                    f"{self.directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}; download it again"
                )
            return dict.fromkeys(read_header(self.directory / SINGLE_NAME), SINGLE_NAME)
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            bad = sorted({f for f in files.values() if Path(f).name != f})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors index ({error!r}); download the file again") from None
        if bad:
            raise CheckpointError(
                f"{path}: shards must be plain file names, found {bad}; put them beside the index, as released"
            )
        return files

    def find(self, names: Iterable[str]) -> dict[str, StoredTensor]:
        """Where the tensors of ``names`` lie; names that the index lacks are left out.

        Raises:
            CheckpointError: naming every shard that is missing or damaged, every tensor that the index and
                these shards do not agree on, and every tensor that two of them hold.
        """
        wanted = [name for name in names if name in self.files]
        found: dict[str, StoredTensor] = {}
        problems = []
        for file in sorted({self.files[name] for name in wanted}):
            try:
                header = read_header(self.directory / file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for name, tensor in header.items():
                if name in found:
                    problems.append(f"{name} is in two shards, {found[name].path.name} and {file}")
                elif self.files.get(name) != file:
                    problems.append(f"{name} is in {file}, the index says {self.files.get(name, 'nothing of it')}")
                found[name] = tensor
            lost = (name for name, place in self.files.items() if place == file and name not in header)
            problems += [f"{name} is not in {file}, where the index places it" for name in lost]
        if problems:
            raise CheckpointError("\n".join([f"{self.directory}: the index and the shards do not agree", *problems]))
        return {name: found[name] for name in wanted}
