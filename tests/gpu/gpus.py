"""How many GPUs the two ranks of a job have: one each, or one for both.

A GPU that two processes share takes turns between them, so a boundary between the ranks takes milliseconds instead of
microseconds. What they compute is the same, and a machine with one GPU can test it. Users are refused such a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

over_gpus = pytest.mark.parametrize(
    "gpus",
    [pytest.param(1, marks=pytest.mark.gpu, id="one-gpu"), pytest.param(2, marks=pytest.mark.gpu2, id="two-gpus")],
)


@contextmanager
def ranks_on(gpus: int) -> Iterator[None]:
    """Inside, a rank of a job takes the first GPU without asking who else does, if there is one for all of them."""
    if gpus > 1:
        yield
        return
    with mock.patch("dspark_trt.runtime_py.opening.rank_device", lambda *_: torch.device("cuda", 0)):
        yield
