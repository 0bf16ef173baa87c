"""What the commands print: tables of facts, configurations, tensors and shapes; sizes and times to read.

Names and values are printed as they are: in a path, brackets are no markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from .build_config import BuildConfig, Kind
from .checkpoint import ShardConfig
from .checkpoint.tensor_file import StoredTensor
from .config import ModelConfig, to_dict
from .engine import dimension_ranges
from .engine_dir import EngineDir, network_io


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=Text(title), title_justify="left", show_header=bool(columns))


def _add_row(table: Table, *values: object) -> None:
    table.add_row(*(Text(str(value)) for value in values))


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Name and value, one pair a row."""
    table = _table(title)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        _add_row(table, name, value)
    return table


def config_table(target: ModelConfig | None, draft: ModelConfig) -> Table:
    """Key by key what both networks are, side by side."""
    columns = {"draft": to_dict(draft)} | ({"target": to_dict(target)} if target else {})
    table = _table("configuration", "", *columns)
    for name in dict.fromkeys(key for values in columns.values() for key in values):
        _add_row(table, name, *(values.get(name, "-") for values in columns.values()))
    return table


def tensor_table(tensors: Iterable[StoredTensor]) -> Table:
    """Number and size of ``tensors`` by part of the model (layer, draft stage) and dtype."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        parts = tensor.name.split(".")
        key = (".".join(parts[: 2 if parts[0] in ("layers", "mtp") else 1]), tensor.dtype)
        counts[key] += 1
        sizes[key] += tensor.nbytes
    table = _table("tensors", "part", "dtype", "number", "size")
    for key, count in counts.items():
        _add_row(table, *key, count, readable_size(sizes[key]))
    return table


def shape_table(kind: Kind, source: ShardConfig | EngineDir, build: BuildConfig) -> Table:
    """The inputs of an engine and what each profile takes."""
    io = network_io(kind, source, build)
    ranges = dimension_ranges(kind, source.draft, build)
    table = _table(f"{kind} engine", "input", "dtype", *ranges)
    for info in io.inputs:
        shapes = [
            ", ".join(str(d) if isinstance(d, int) else f"{sizes[d][0]} to {sizes[d][2]}" for d in info.shape)
            for sizes in ranges.values()
        ]
        _add_row(table, info.name, str(info.dtype).removeprefix("torch."), *shapes)
    return table


def readable_size(count: float) -> str:
    """Bytes with a unit, such as "1.2 GB"."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count:.0f} bytes"


def readable_duration(seconds: float) -> str:
    """Such as "12.0 s" or "5 min"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
