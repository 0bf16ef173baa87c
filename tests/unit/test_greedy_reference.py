"""The tokens that other executors are held to are what the CPU still decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import greedy_reference
from tests.placeholder_engines import make_engines


@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_the_recorded_tokens_come_out_again(mode: str, tmp_path: Path) -> None:
    """Of some prompts and their first tokens; ``python -m tests.greedy_reference`` records all anew."""
    engines = make_engines(tmp_path, 1, **greedy_reference.build_options(mode))
    recorded = greedy_reference.recorded(mode)
    assert len(recorded) == greedy_reference.PROMPTS
    assert all(len(row) == greedy_reference.TOKENS for row in recorded)
    assert greedy_reference.decode_on_cpu(engines, 3, 16) == [row[:16] for row in recorded[:3]]


@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_the_recorded_spread_is_of_that_size(mode: str, tmp_path: Path) -> None:
    """Fewer positions give quantiles of their own; a patch that missed its functions would give zeros."""
    engines = make_engines(tmp_path, 1, **greedy_reference.build_options(mode))
    found = greedy_reference.measure_spread(engines, [row[:12] for row in greedy_reference.recorded(mode)[:6]])
    recorded = greedy_reference.recorded_spread(mode)
    assert 0.5 * recorded["half"] < found["half"] < 2 * recorded["half"]


def test_prompts_differ() -> None:
    prompts = greedy_reference.prompts()
    assert len({tuple(p) for p in prompts}) == greedy_reference.PROMPTS
    assert all(len(p) == greedy_reference.CONTEXT + 1 for p in prompts)
