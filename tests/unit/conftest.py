"""What the unit tests share: an option, and the TensorRT that builds plans without a GPU."""

from __future__ import annotations

import pytest
from dspark_trt.plugins import tensorrt_api
from dspark_trt.plugins.tensorrt_api import TensorRT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensorrt-include",
        action="append",
        metavar="DIR",
        help="folder with NvInfer.h, for tests of the TensorRT plugins in C++; may be given several times",
    )


@pytest.fixture(scope="module")
def api() -> TensorRT:
    found = tensorrt_api.probe("tensorrt_rtx")
    if isinstance(found, str):
        pytest.skip(f"TensorRT-RTX is not installed ({found})")
    return found
