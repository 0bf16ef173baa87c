"""The tokens that other executors are held to are what the CPU still decodes, and texts are explained by logits of
what decoded them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dspark_trt.runtime_py.communicator import Communicator, SingleProcess
from torch import Tensor

from tests import greedy_reference
from tests.greedy_reference import Divergence, View, ViewError, where_texts_part
from tests.placeholder_engines import make_engines
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize("ranks", greedy_reference.RANKS)
@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_the_recorded_tokens_come_out_again(mode: str, ranks: int, tmp_path: Path) -> None:
    """Of some prompts and their first tokens; ``python -m tests.greedy_reference`` records all anew."""
    engines = make_engines(tmp_path, ranks, **greedy_reference.build_options(mode))
    recorded = greedy_reference.recorded(mode, ranks)
    assert len(recorded) == greedy_reference.PROMPTS
    assert all(len(row) == greedy_reference.TOKENS for row in recorded)
    assert greedy_reference.decode_on_cpu(engines, ranks, 3, 16) == [row[:16] for row in recorded[:3]]


def test_two_ranks_are_not_held_to_the_texts_of_one() -> None:
    """Their partial sums round otherwise, which released numerics turn into other texts; in float32 nearly none."""
    same = {
        mode: sum(a == b for a, b in zip(*(greedy_reference.recorded(mode, ranks) for ranks in (1, 2)), strict=True))
        for mode in greedy_reference.MODES
    }
    assert same["released"] < 5 and same["float32"] >= greedy_reference.PROMPTS - 1


@pytest.mark.parametrize("ranks", greedy_reference.RANKS)
@pytest.mark.parametrize("mode", greedy_reference.MODES)
def test_the_recorded_spread_is_of_that_size(mode: str, ranks: int, tmp_path: Path) -> None:
    """Fewer positions give quantiles of their own; a patch that missed its functions would give zeros."""
    engines = make_engines(tmp_path, ranks, **greedy_reference.build_options(mode))
    tokens = [row[:12] for row in greedy_reference.recorded(mode, ranks)[:6]]
    found = greedy_reference.measure_spread(engines, ranks, tokens)
    recorded = greedy_reference.recorded_spread(mode, ranks)
    assert 0.5 * recorded["half"] < found["half"] < 2 * recorded["half"]


def test_prompts_differ() -> None:
    prompts = greedy_reference.prompts()
    assert len({tuple(p) for p in prompts}) == greedy_reference.PROMPTS
    assert all(len(p) == greedy_reference.CONTEXT + 1 for p in prompts)


@pytest.mark.parametrize("ranks", greedy_reference.RANKS)
def test_a_view_has_the_logits_that_the_recorded_tokens_were_chosen_from(ranks: int, tmp_path: Path) -> None:
    """Step by step, and after a whole text: exact sums make both of them the bits that the decode had."""
    engines = make_engines(tmp_path, ranks, **greedy_reference.build_options("released"))
    tokens = [row[:9] for row in greedy_reference.recorded("released", ranks)[:2]]
    prompts = greedy_reference.prompts()[:2]

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        view = View(engines, "cpu", communicator=communicator)
        texts = [[*prompt, *row[:-1]] for prompt, row in zip(prompts, tokens, strict=True)]
        return view.forced(prompts, tokens), view.after(texts)

    for forced, after in on_ranks(ranks, work):
        assert forced.argmax(-1).tolist() == tokens
        assert torch.equal(forced[:, -1], after)


def test_texts_of_two_ranks_are_not_explained_by_the_logits_of_one(tmp_path: Path) -> None:
    """Three of the recorded texts that part early; only the right numbers of ranks prefer either of the two tokens."""
    one, two = (greedy_reference.recorded("released", ranks) for ranks in (1, 2))
    parts = [
        next(i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b) for rows in zip(one, two, strict=True)
    ]
    early = sorted(range(len(parts)), key=parts.__getitem__)[:3]
    found = [two[i] if i in early else one[i] for i in range(len(one))]
    options = greedy_reference.build_options("released")
    engines = {ranks: make_engines(tmp_path, ranks, **options) for ranks in (1, 2)}
    alone = View(engines[1], "cpu", communicator=SingleProcess())

    def work(communicator: Communicator) -> list[Divergence]:
        return where_texts_part(found, one, (alone, View(engines[2], "cpu", communicator=communicator)))

    explained = on_ranks(2, work)
    assert explained[0] == explained[1]
    assert [(d.prompt, d.position) for d in explained[0]] == [(i, parts[i]) for i in sorted(early)]
    assert all(d.margin_cpu >= 0 >= d.margin_other and d.rounding > 0 for d in explained[0])
    with pytest.raises(ViewError, match=r"of 3 texts that part, 3 would not have been decoded .* number of ranks"):
        where_texts_part(found, one, (alone, alone))


class Table:
    """Logits that do not depend on the text."""

    def __init__(self, *logits: float):
        self.row = torch.tensor(logits)

    def after(self, texts: Sequence[Sequence[int]]) -> Tensor:
        return self.row.expand(len(texts), -1)


def test_the_wrong_sign_of_a_margin_is_refused_beyond_a_tie() -> None:
    wanted = [[0, 0]] * greedy_reference.PROMPTS
    found = [[0, 1], *wanted[1:]]
    likes_0, likes_1, undecided = Table(1.0, 0.25), Table(0.25, 0.5), Table(1.0, 1.0)
    assert where_texts_part(wanted, wanted, (likes_1, likes_1)) == []
    assert where_texts_part(found, wanted, (likes_0, likes_1)) == [Divergence(0, 1, 0.75, -0.25)]
    assert where_texts_part(found, wanted, (undecided, undecided))[0].rounding == 0
    for views in [(likes_1, likes_1), (likes_0, likes_0)]:
        with pytest.raises(ViewError, match="1 would not"):
            where_texts_part(found, wanted, views)
    assert where_texts_part(found, wanted, (likes_1, likes_1), tie=0.25)[0].margin_cpu == -0.25
