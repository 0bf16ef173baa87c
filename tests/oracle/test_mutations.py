"""Faults put in on purpose: the stage comparison must fail and name the stage where the fault is (row POS-3).

The checkpoint of the draft has large epsilons, few Sinkhorn rounds and a tight clamp, so that faults there
show; without a fault it passes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.configs import VARIANTS, TinyCheckpoint
from tests.oracle.comparison import FLOAT32, differences, numpy_draft, numpy_target, run_draft, run_target, two_steps
from tests.oracle.mutations import DRAFT_MUTATIONS, RELEASED_MUTATIONS, TARGET_MUTATIONS, Mutation, Patch
from tests.oracle.numpy_ops import Array
from tests.oracle.test_stages import MEDIAN

Tiny = Callable[..., TinyCheckpoint]
Wanted = Callable[[str], dict[str, Array]]
EXAGGERATED = {"hc_eps": 1e-2, "rms_norm_eps": 1e-2, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.5}
NOTICED = 5 * FLOAT32
"""A mutation must move its stage by more than this, so that no pass depends on luck."""


@pytest.fixture(scope="module")
def wanted_draft(tiny: Tiny) -> Wanted:
    made: dict[str, dict[str, Array]] = {}

    def make(variant: str) -> dict[str, Array]:
        if variant not in made:
            checkpoint = tiny(variant, **EXAGGERATED)
            oracle = numpy_draft(checkpoint)
            for one in two_steps(checkpoint):
                made[variant] = oracle.run(*one.arrays())
        return made[variant]

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_fault_the_exaggerated_draft_passes(tiny: Tiny, wanted_draft: Wanted, variant: str) -> None:
    checkpoint = tiny(variant, **EXAGGERATED)
    assert not differences(run_draft(checkpoint, two_steps(checkpoint)), wanted_draft(variant), FLOAT32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mutation", DRAFT_MUTATIONS, ids=lambda m: m.__name__)
def test_draft_fault_is_named_by_its_stage(
    tiny: Tiny, wanted_draft: Wanted, monkeypatch: Patch, variant: str, mutation: Mutation
) -> None:
    """POS-3 and the list of mutations: red, and the first stage named is the faulty one."""
    checkpoint = tiny(variant, **EXAGGERATED)
    found = run_draft(checkpoint, two_steps(checkpoint), prepare=lambda model: mutation(monkeypatch, model))
    failed = differences(found, wanted_draft(variant), FLOAT32)
    assert failed, "the fault went unnoticed"
    assert failed[0].stage == DRAFT_MUTATIONS[mutation]
    assert failed[0].distance > NOTICED


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mutation", RELEASED_MUTATIONS, ids=lambda m: m.__name__)
def test_released_fault_is_named_by_its_stage(tiny: Tiny, monkeypatch: Patch, variant: str, mutation: Mutation) -> None:
    """POS-7: a wrong rounding point shows in the median row of its stage."""
    checkpoint = tiny(variant)
    passes = two_steps(checkpoint)
    with monkeypatch.context() as patch:
        found = run_draft(checkpoint, passes, dtype=None, prepare=lambda model: mutation(patch, model))
    oracle = numpy_draft(checkpoint, released=True)
    oracle.run(*passes[0].arrays())
    failed = differences(found, oracle.run(*passes[1].arrays(), forced=found), MEDIAN, np.median)
    assert failed and failed[0].stage == RELEASED_MUTATIONS[mutation], failed


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 319, (50,), dtype=torch.int32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def wanted_target(tiny: Tiny, tokens: Tensor) -> dict[str, dict[str, Array]]:
    return {variant: numpy_target(tiny(variant)).run(tokens.numpy()) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mutation", TARGET_MUTATIONS, ids=lambda m: m.__name__)
def test_target_fault_is_named_by_its_stage(
    tiny: Tiny,
    tokens: Tensor,
    wanted_target: dict[str, dict[str, Array]],
    monkeypatch: Patch,
    variant: str,
    mutation: Mutation,
) -> None:
    """POS-6, and faults of the target's own layers."""
    found = run_target(tiny(variant), tokens, prepare=lambda model: mutation(monkeypatch, model))
    failed = differences(found, wanted_target[variant], FLOAT32)
    assert failed and failed[0].stage == TARGET_MUTATIONS[mutation], failed
    assert failed[0].distance > NOTICED
