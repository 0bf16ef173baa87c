"""What all tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.configs import TinyCheckpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensorrt-include",
        action="append",
        metavar="DIR",
        help="folder with NvInfer.h, for tests of the TensorRT plugins in C++; may be given several times",
    )


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """One thread: the same bits on every machine, and no fight over the cores with other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyCheckpoint]:
    """``tiny(variant, **overrides)``: a tiny checkpoint, written once a session for each set of arguments."""
    # Here, so that tests on a GPU machine need no more than what they import themselves.
    from tests.configs import TinyCheckpoint

    made: dict[str, TinyCheckpoint] = {}

    def make(variant: str, **overrides: Any) -> TinyCheckpoint:
        key = json.dumps([variant, overrides], sort_keys=True)
        if key not in made:
            made[key] = TinyCheckpoint(tmp_path_factory.mktemp("tiny"), variant, overrides=overrides)
        return made[key]

    return make
