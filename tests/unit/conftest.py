"""What the unit tests share: the TensorRT that builds plans without a GPU."""

from __future__ import annotations

import pytest
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.tensorrt_api import TensorRT


@pytest.fixture(scope="module")
def api() -> TensorRT:
    found = tensorrt_api.probe("tensorrt_rtx")
    if isinstance(found, str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    return found
