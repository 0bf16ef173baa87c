"""The example shell scripts: flags that the commands really have, and mpirun's moods."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example_scripts import CHECKPOINT, EXAMPLES


def stub(directory: Path, name: str, body: str) -> None:
    """A command of that name, in bash."""
    file = directory / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)


def bash(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("version", "user", "cores", "flags"),
    [
        ("mpirun (Open MPI) 5.0.11", 1000, 8, ""),
        ("mpirun (Open MPI) 5.0.11", 0, 8, "--allow-run-as-root"),
        ("mpirun (Open MPI) 5.0.11", 0, 1, "--allow-run-as-root --oversubscribe"),
        ("mpirun (Open MPI) 4.1.6", 1000, 1, "--oversubscribe"),
        ("HYDRA build details: Version: 4.2", 0, 1, ""),
    ],
)
def test_mpirun_is_asked_for_what_it_needs(tmp_path: Path, version: str, user: int, cores: int, flags: str) -> None:
    """Open MPI refuses root and more ranks than cores; others don't know its flags."""
    stub(tmp_path, "mpirun", f"echo '{version}'")
    stub(tmp_path, "id", f"echo {user}")
    stub(tmp_path, "nproc", f"echo {cores}")
    script = f'source <(sed -n "/^mpirun_flags/,/^}}/p" {EXAMPLES}/quickstart.sh); set -eu; mpirun_flags 2'
    done = bash("-c", script, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()) == flags


def test_the_build_script_uses_flags_that_exist(tmp_path: Path) -> None:
    """Converts, and comes as far as a dry run of both builds."""
    commands = Path(sys.executable).parent
    stub(tmp_path, "dspark-build", f'{commands}/dspark-build "$@" --dry-run')
    stub(tmp_path, "dspark-inspect", 'echo "inspect $@"')
    stub(tmp_path, "dspark-convert", f'{commands}/dspark-convert "$@"')
    output = tmp_path / "output"
    done = bash(str(EXAMPLES / "build_engines.sh"), str(CHECKPOINT), str(output), "2", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in output.iterdir()) == ["shards"]
    for line in ("plugin, released numerics, bfloat16", "native, dequantized numerics, bfloat16"):
        assert line in done.stdout
    assert [x for x in done.stdout.splitlines() if x.startswith("inspect")] == [
        f"inspect {output}/engines-plugin",
        f"inspect {output}/engines-native",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "tests/gpu"),
        ("-k boundary", "tests/gpu -k boundary"),
        ("tests/gpu/test_mhc_kernels.py -k boundary", "tests/gpu/test_mhc_kernels.py -k boundary"),
        ("-x tests/gpu/test_mhc_kernels.py::test_boundary", "-x tests/gpu/test_mhc_kernels.py::test_boundary"),
    ],
)
def test_files_narrow_a_run_on_a_gpu(tmp_path: Path, arguments: str, expected: str) -> None:
    """Beside the whole folder, pytest would take them for nothing new."""
    stub(tmp_path, "python3", 'echo "$@"')
    done = bash(str(EXAMPLES.parent / "tests" / "run_gpu.sh"), *arguments.split(), path=tmp_path)
    assert done.stdout == f"-m pytest -q -m gpu or gpu2 {expected}\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["one"], ["1", "2", "3", "4"]])
def test_the_build_script_says_how_to_call_it(tmp_path: Path, arguments: list[str]) -> None:
    done = bash(str(EXAMPLES / "build_engines.sh"), *arguments, path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: bash ")


@pytest.mark.parametrize(
    ("answer", "found"),
    [(None, "not there"), ("echo 3.9", "3.9"), ("echo 3.14", "3.14"), ("echo 2.7", "2.7"), ("exit 1", "not there")],
)
def test_the_quickstart_wants_a_python_that_the_project_runs_on(tmp_path: Path, answer: str | None, found: str) -> None:
    """One line, before anything is made or emptied."""
    script = tmp_path / "clone" / "examples" / "quickstart.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(EXAMPLES / "quickstart.sh", script)
    (kept := tmp_path / "clone" / "build" / "quickstart" / "kept").mkdir(parents=True)
    if answer:
        stub(tmp_path, "python9.9", answer)
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": "python9.9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"python9.9 is {found}, Python 3.10 to 3.13 is needed; name one with: PYTHON=python3.12 bash {script}\n"
    )
    assert kept.exists() and not (tmp_path / "clone" / ".venv").exists()
