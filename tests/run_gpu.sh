#!/usr/bin/env bash
# Runs the tests marked gpu (one NVIDIA GPU) and gpu2 (two) with the python3 of the machine, which
# needs torch with CUDA, mpi4py and pytest. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Folders become packages by links, so that nothing has to be installed.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/dspark_trt"
for folder in builder plugins runtime_py; do ln -s "$PWD/$folder" "$packages/dspark_trt/$folder"; done
PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} python3 -m pytest -q -m "gpu or gpu2" tests/gpu "$@"
