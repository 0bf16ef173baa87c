"""The tokens that other executors are held to are what the CPU still decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import greedy_reference


@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_the_recorded_tokens_come_out_again(mode: str, tmp_path: Path) -> None:
    """Of some prompts and their first tokens; ``python -m tests.greedy_reference`` records all anew."""
    found = greedy_reference.decode_on_cpu(tmp_path, mode, 3, 16)
    recorded = greedy_reference.recorded(mode)
    assert len(recorded) == greedy_reference.PROMPTS
    assert all(len(row) == greedy_reference.TOKENS for row in recorded)
    assert found == [row[:16] for row in recorded[:3]]


def test_prompts_differ() -> None:
    prompts = greedy_reference.prompts()
    assert len({tuple(p) for p in prompts}) == greedy_reference.PROMPTS
    assert all(len(p) == greedy_reference.CONTEXT + 1 for p in prompts)
