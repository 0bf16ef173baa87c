"""Engine directories whose plans are placeholders: the torch session reads their weights, and building plans
takes most of a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder import engine_dir, engine_jobs
from dspark_trt.builder.build_config import BuildConfig
from dspark_trt.builder.checkpoint import convert_checkpoint
from dspark_trt.plugins.tensorrt_api import EngineOptions

from tests.example_scripts import CHECKPOINT


class NoTensorRT:
    """What an engine directory records of the TensorRT that built it."""

    product, version = "tensorrt_rtx", "0.0.0.0"
    is_rtx, is_8 = True, False

    def compute_capabilities(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        return requested or ("8.9",)

    def option_problem(self, options: EngineOptions) -> str:
        return ""


def make_engines(root: Path, tp_size: int, **build: Any) -> Path:
    """An engine directory of the trained tiny models below ``root``, built with the options ``build``."""
    if not (shards := root / f"shards{tp_size}").exists():
        convert_checkpoint(CHECKPOINT, shards, tp_size=tp_size)
    output = root / "-".join([f"tp{tp_size}", *(f"{k}.{v}" for k, v in build.items())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_jobs, "_build_one", lambda *_: (b"no plan", set()))
        engine_dir.build_engine_dir(shards, output, BuildConfig(**build), api=NoTensorRT())  # type: ignore[arg-type]
    return output
