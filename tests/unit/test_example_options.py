"""Command lines of the examples: flags of several values, and what is checked before any work."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import tyro

from tests.example_scripts import load_example

common, run = load_example("_common"), load_example("run")


def parse(program: Any, *flags: str) -> Any:
    """The options of an example as its main() reads them."""
    needed = {"run": ["--engine-dir", "e"], "measure_acceptance": ["--engine-dir", "e", "--output", "o"]}
    return common.parse_options(program.Options, [*needed.get(program.__name__, []), *flags], None)


SEVERAL = {
    "run": {
        "--prompt": "a b",
        "--request-counts": "1 2",
        "--stop": "a b",
        "--stop-token-ids": "1 2",
        "--confidence-temperatures": "1 2",
    },
    "measure_acceptance": {"--temperatures": "0 1", "--methods": "standard block"},
    "compare_accuracy": {"--networks": "draft target"},
}


@pytest.mark.parametrize(("program", "flag"), [(name, flag) for name, flags in SEVERAL.items() for flag in flags])
def test_flags_of_several_values(program: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """tyro takes the last of repeated flags, which loses the values of the others, and none for a flag without any,
    which for most means the default."""
    if program == "compare_accuracy":
        pytest.importorskip("polygraphy")
    module, values = load_example(program), SEVERAL[program][flag].split()
    parse(module, flag, *values)
    twice = f"{flag} was given 2 times, expected once; pass all values after one"
    none = f"{flag} names none, expected at least one; leave the option out for the default"
    spelled = flag[:2] + flag[2:].replace("-", "_")
    for flags, message in (
        ([flag, values[0], flag, values[1]], twice),
        ([flag, values[0], f"{spelled}={values[1]}"], twice),
        ([flag], none),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(module, *flags)
        assert ended.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


def test_every_flag_of_several_values_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that tyro's help shows with more than one value; all problems come in one line."""
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
        tyro.cli(run.Options, args=["--help"])
    assert set(re.findall(r"(--[a-z-]+) \S*\[[A-Z]+ \[", told.getvalue())) == SEVERAL["run"].keys()
    with pytest.raises(SystemExit):
        parse(run, "--prompt", "--stop")
    assert capsys.readouterr().err.count("names none") == 2
