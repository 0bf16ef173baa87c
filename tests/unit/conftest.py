"""What the unit tests share: the TensorRT that builds plans without a GPU, shards, and stand-ins of networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspark_trt.builder import network, onnx_export
from dspark_trt.builder.checkpoint import convert_checkpoint
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.tensorrt_api import TensorRT

from tests.one_op_models import stand_in_export
from tests.released import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def api() -> TensorRT:
    found = tensorrt_api.probe("tensorrt_rtx")
    if isinstance(found, str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of a random V4.1 checkpoint with a tokenizer."""
    root = tmp_path_factory.mktemp("shards")
    write_checkpoint(root / "released", tiny_config("v4.1"))
    (root / "released" / "tokenizer.json").write_text("{}")
    convert_checkpoint(root / "released", root / "shards", tp_size=2)
    return root / "shards"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in place of the exporter of both networks; a network is then what it is loaded from."""

    def replace(export: Callable[..., Any]) -> None:
        monkeypatch.setattr(network, "load_network", lambda *source, **options: source)
        monkeypatch.setattr(onnx_export, "export_network", export)

    replace(stand_in_export)
    return replace
