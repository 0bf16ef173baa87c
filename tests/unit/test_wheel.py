"""A wheel built from the repository installs into an empty environment and works there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("builder", "plugins", "runtime_py", "cpp_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, cwd=out)
    return next(out.glob("*.whl"))


def test_wheel_holds_only_its_namespace(wheel: Path) -> None:
    """Nothing called builder or plugins may land at the top of site-packages."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names} == {"dspark_trt", f"{wheel.name.split('-py3')[0]}.dist-info"}
    for package in ("builder", "builder/checkpoint", "builder/model", "plugins", "runtime_py"):
        assert f"dspark_trt/{package}/__init__.py" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The commands run from any directory: a checkpoint is converted, and inspected."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # The release that these tests run with: another one may be a download of gigabytes.
    release = torch.__version__.split("+")[0]
    run(python, "-m", "pip", "install", "--quiet", f"torch=={release}", cwd=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    binaries = environment / "bin"
    checkpoint = ROOT / "examples" / "tiny" / "checkpoint"
    run(binaries / "dspark-convert", "--checkpoint", checkpoint, "--output", "shards", "--tp-size", "2", cwd=tmp_path)
    assert {p.name for p in (tmp_path / "shards").iterdir()} >= {
        "config.json",
        "rank0.safetensors",
        "rank1.safetensors",
    }
    assert "rank shards" in run(binaries / "dspark-inspect", "shards", cwd=tmp_path)
    assert "torch on the CPU" in run(binaries / "dspark-inspect", cwd=tmp_path)
