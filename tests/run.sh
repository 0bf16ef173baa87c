#!/usr/bin/env bash
# Sets up an environment in .venv (kept between runs) and runs everything that needs no GPU: format,
# lint, types, a wheel in an empty environment, and the tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
# shellcheck disable=SC1091
source .venv/bin/activate
python -m pip install --quiet --upgrade pip
# Named first: an index that offers a CPU build of this release saves gigabytes.
python -m pip install --quiet torch==2.13.0
python -m pip install --quiet --editable '.[rtx,mpi,compare,plot,nvcc,test]'
if ! command -v g++ >/dev/null; then
  echo "g++ was not found: tests that compile C++ or the CUDA kernels skip (Debian, Ubuntu: apt-get install g++)" >&2
fi

echo "== format, lint, types"
ruff format --check .
ruff check .
# include/ and the table of operations are written from the declarations in Python.
clang-format --dry-run --Werror cpp_plugins/kernels/* cpp_plugins/tensorrt/*.{cpp,h}
mypy builder plugins runtime_py setup.py examples/*.py

echo "== tests"
# Plugin objects made by hand get a process of their own: they are TensorRT's to free, and a fault of its
# bindings would end the whole run.
python -m pytest -q --deselect tests/unit/test_trt_plugin.py "$@"
if [[ $# -eq 0 ]]; then
  python -m pytest -q tests/unit/test_trt_plugin.py
fi
