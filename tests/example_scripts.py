"""The example scripts as modules, and the trained tiny checkpoint."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CHECKPOINT = EXAMPLES / "tiny" / "checkpoint"


def load_example(name: str) -> Any:
    """The script ``examples/{name}.py``, imported with its folder on the path as when it is started."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
