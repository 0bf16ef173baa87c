"""Optimization profiles: the ranges of shapes that an engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""Input name -> (smallest, optimal, largest) shape."""


class ShapeRangeError(ValueError):
    """An input has a shape that no profile of the engine covers."""


def check_shapes(profiles: Sequence[Profile], shapes: Mapping[str, Sequence[int]]) -> int:
    """Index of the first profile that covers ``shapes``.

    Raises:
        ShapeRangeError: naming for each profile the inputs outside it, with shape and range.
    """
    reasons = []
    for index, profile in enumerate(profiles):
        wrong = [f"{name} is missing" for name in profile if name not in shapes]
        for name, shape in shapes.items():
            low, _, high = profile.get(name, ((), (), ()))
            inside = len(shape) == len(low) and all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))
            if name not in profile:
                wrong.append(f"{name} is not an input")
            elif not inside:
                wrong.append(f"{name} is {list(shape)}, expected {list(low)} to {list(high)}")
        if not wrong:
            return index
        reasons.append(f"profile {index}: {'; '.join(wrong)}")
    raise ShapeRangeError("no profile of the engine covers these shapes. " + ". ".join(reasons))
