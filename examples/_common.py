"""What the examples share: text to token ids and back, prompt files, what computes, and opening a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from dspark_trt.builder.engine_dir import EngineDir, EngineDirError
from dspark_trt.runtime_py.communicator import Communicator, LaunchError, connect
from dspark_trt.runtime_py.requests import RequestError
from tokenizers import Tokenizer


class Text:
    """A directory's tokenizer, with the model's beginning-of-sequence token in front of every prompt."""

    def __init__(self, directory: Path, bos_token_id: int | None):
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise RequestError(f"{file}: not found; text prompts need the checkpoint's tokenizer.json, copy it there")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._prefix = [] if bos_token_id is None else [bos_token_id]

    def encode(self, text: str) -> list[int]:
        return self._prefix + list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one a line; empty lines are passed over."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; pass a file with one prompt a line") from None
    if not (prompts := [line for line in lines if line.strip()]):
        raise RequestError(f"{path}: no prompt in it; expected one a line")
    return prompts


def device_name(place: torch.device) -> str:
    """What computes, for people."""
    return "the CPU" if place.type == "cpu" else torch.cuda.get_device_name(place)


def open_job(engine_dir: Path, command: str) -> tuple[EngineDir, Communicator] | None:
    """An engine directory and the ranks that were started for it; None, with the error printed, if they don't fit.

    Args:
        command: how the user starts the program, for the error's advice.
    """
    try:
        directory = EngineDir.open(engine_dir)
        return directory, connect(directory.tp_size, command)
    except (EngineDirError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None
