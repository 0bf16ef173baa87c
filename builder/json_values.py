"""JSON from outside, read as the types that this package works with.

A configuration file is edited, copied and damaged like any other file, and a value of a wrong type would cause an error
far from its origin. :func:`read_value` therefore compares a parsed value with a type, key by key, and says for each
that differs what was found and what was expected. Types are Python's own, so that a dataclass is its own schema.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[Any, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def read_object(path: Path, error: type[Exception], *, absent: str, remedy: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Args:
        error: what to raise when there is none.
        absent: what to do when the file is not there.
        remedy: what to do when it is there and holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path}: not found; {absent}") from None
    except OSError as problem:
        raise error(f"{path}: can't be read ({problem.strerror}); make it readable for this user") from None
    except ValueError as problem:
        raise error(f"{path}: not valid JSON in UTF-8 ({problem}); {remedy}") from None
    if not isinstance(values, dict):
        raise error(f"{path}: holds a {type(values).__name__}, expected a JSON object; {remedy}")
    return values


def field_types(kind: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Name -> type of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name not in without}


def read_value(kind: Any, value: Any, key: str, problems: list[str]) -> Any:
    """``value`` as a ``kind``; what differs is added to ``problems``, after which the result means nothing.

    Args:
        kind: a plain type, an enumeration, a dataclass; ``Literal``, ``X | None``, ``tuple[X, ...]`` (a list),
            ``Mapping[str, X]``; or a dictionary of such, for an object of exactly these keys.
        key: name of the value in the messages.
    """

    def wrong(expected: str) -> None:
        problems.append(f"{key} is {value!r}, expected {expected}")

    if kind is Any:
        return value
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return wrong("an object")
        unknown, missing = sorted(value.keys() - kind.keys()), sorted(kind.keys() - value.keys())
        if unknown or missing:
            problems.append(f"{key}: unknown keys {unknown}, missing keys {missing}".removeprefix(": "))
        return {n: read_value(k, value[n], f"{key}.{n}" if key else n, problems) for n, k in kind.items() if n in value}
    if dataclasses.is_dataclass(kind):
        before = len(problems)
        values = read_value(field_types(kind), value, key, problems)  # type: ignore[arg-type]
        return kind(**values) if len(problems) == before else None  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else read_value(arguments[0], value, key, problems)
    if origin is Literal:
        return value if value in arguments else wrong(f"one of {', '.join(map(repr, arguments))}")
    if origin is tuple:
        if not isinstance(value, list):
            return wrong("a list")
        return tuple(read_value(arguments[0], entry, f"{key}[{i}]", problems) for i, entry in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            return wrong("an object")
        return {name: read_value(arguments[1], entry, f"{key}[{name!r}]", problems) for name, entry in value.items()}
    if issubclass(kind, enum.Enum):
        values = [member.value for member in kind]
        return kind(value) if value in values else wrong(f"one of {', '.join(map(repr, values))}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        return wrong(_NAMES[kind])
    return value
