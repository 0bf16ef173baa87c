"""Options of the unit tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensorrt-include",
        action="append",
        metavar="DIR",
        help="folder with NvInfer.h, for tests of the TensorRT plugins in C++; may be given several times",
    )
