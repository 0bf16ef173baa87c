"""Compares what runners returned, output by output; nothing that could not be compared passes.

Structure first (at least two runners; the same, positive number of iterations; the same outputs by name,
dtype and shape, none of them empty), then the places of NaN and infinities, then values: integers exactly,
floats within a share of the reference's largest magnitude. Polygraphy's own comparison skips missing
outputs, matches renamed ones by position, passes empty ones, and takes token ids that are one apart as
equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch


class ComparisonError(ValueError):
    """There is nothing to compare."""


@dataclass(frozen=True)
class OutputResult:
    """One output of one runner against the reference, over all iterations."""

    runner: str
    output: str
    max_absolute: float = 0.0
    max_relative: float = 0.0
    """As a share of the reference's largest magnitude of the iteration."""
    limit: float = 0.0
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None


def compare_results(results: Any, limits: Mapping[str, float]) -> list[OutputResult]:
    """One result for each output of each runner, compared with those of the first runner.

    Args:
        results: what ``polygraphy.comparator.Comparator.run`` returned: (runner name, iterations) pairs, an
            iteration being output name -> array or tensor.
        limits: runner name -> largest ``max_relative`` of its floating-point outputs.

    Raises:
        ComparisonError: fewer than two runners, or a reference without iterations or outputs.
    """
    runs = [(name, [dict(iteration.items()) for iteration in iterations]) for name, iterations in results]
    if len(runs) < 2:
        raise ComparisonError(f"{len(runs)} runner(s) gave results ({[n for n, _ in runs]}), expected at least two")
    (reference_name, reference), *others = runs
    if not reference or not all(reference):
        raise ComparisonError(
            f"{reference_name} gave outputs {[sorted(i) for i in reference]}, expected at least one iteration and "
            "at least one output in each"
        )
    return [result for name, found in others for result in _compare_run(name, found, reference, limits[name])]


def _compare_run(
    runner: str, found: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], limit: float
) -> Iterator[OutputResult]:
    if len(found) != len(reference):
        yield OutputResult(runner, "(all)", problem=f"{len(found)} iterations, expected {len(reference)}")
        return
    names = dict.fromkeys(name for iteration in (*reference, *found) for name in iteration)
    for name in names:
        absolute, relative, allowed = 0.0, 0.0, limit
        problem: str | None = None
        for i, (ours, wanted) in enumerate(zip(found, reference, strict=True)):
            if name not in ours or name not in wanted:
                side = runner if name not in ours else "the reference"
                problem = f"iteration {i}: {side} has no such output"
                break
            difference = compare_arrays(ours[name], wanted[name])
            if isinstance(difference, str):
                problem = f"iteration {i}: {difference}"
                break
            largest, rows = difference
            share = float(rows.max())
            absolute, relative = max(absolute, largest), max(relative, share)
            allowed = limit if _is_float(wanted[name]) else 0.0
            if share > allowed:
                where = f"in {int((rows > allowed).sum())} of {rows.size} rows"
                problem = problem or f"iteration {i}: differs by {share:.1e}, limit {allowed:.1e}, {where}"
        yield OutputResult(runner, name, absolute, relative, allowed, problem)


def compare_arrays(found: Any, wanted: Any) -> tuple[float, np.ndarray] | str:
    """Largest difference, and that of each row as a share of ``wanted``'s largest magnitude; or what forbids it.

    Rows are along the last dimension. NaN and infinities must be at the same places with the same sign; the
    finite values are compared.
    """
    (ours_dtype, ours), (dtype, theirs) = as_numpy(found), as_numpy(wanted)
    if ours_dtype != dtype:
        return f"dtype {ours_dtype}, expected {dtype}"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)}, expected {list(theirs.shape)}"
    if not theirs.size:
        return f"empty, shape {list(theirs.shape)}"
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        if count := int((test(ours) != test(theirs)).sum()):
            return f"{name} at other places ({count} of {theirs.size} elements)"
    finite = np.isfinite(theirs)
    difference = np.abs(np.subtract(ours, theirs, out=np.zeros_like(theirs), where=finite))
    largest = np.abs(theirs).max(where=finite, initial=0.0)
    rows = difference.reshape(-1, theirs.shape[-1] if theirs.ndim else 1).max(axis=1)
    return float(rows.max()), rows / (largest or 1.0)


def _is_float(value: Any) -> bool:
    return "float" in as_numpy(value)[0]


def as_numpy(value: Any) -> tuple[str, np.ndarray]:
    """The dtype's name and the values as float64, which holds every id, bfloat16 and float32 exactly."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), value.detach().cpu().double().numpy()
    array = np.asarray(value)
    name = "bfloat16" if array.dtype == ml_dtypes.bfloat16 else array.dtype.name
    return name, array.astype(np.float64)
