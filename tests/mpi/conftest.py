"""Engine directories for jobs to run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from tests.placeholder_engines import make_engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``engines(tp_size)``: an engine directory of the trained tiny models with two cache slots and
    320 positions, without plans."""
    root = tmp_path_factory.mktemp("engines")
    return lru_cache(lambda tp_size: make_engines(root, tp_size, max_batch_size=2, max_seq_len=320))
