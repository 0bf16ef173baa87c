"""Engine directories for jobs to run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dspark_trt.builder import engine_dir
from dspark_trt.builder.checkpoint import convert_checkpoint
from dspark_trt.builder.engine import BuildConfig
from dspark_trt.plugins import tensorrt_api

from tests.example_scripts import CHECKPOINT


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``engines(tp_size)``: an engine directory of the trained tiny models with two cache slots and
    320 positions.

    Its plans are placeholders, for the torch session reads the weights; building takes most of a minute.
    """
    made: dict[int, Path] = {}

    def make(tp_size: int) -> Path:
        if tp_size not in made:
            root = tmp_path_factory.mktemp(f"tp{tp_size}")
            convert_checkpoint(CHECKPOINT, root / "shards", tp_size=tp_size)
            build = BuildConfig(max_batch_size=2, max_seq_len=320)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_dir, "_build_one", lambda *_: (b"no plan", set()))
                engine_dir.build_engine_dir(root / "shards", root / "engines", build, api=tensorrt_api.load())
            made[tp_size] = root / "engines"
        return made[tp_size]

    return make
