#!/usr/bin/env bash
# Runs the tests marked gpu (one NVIDIA GPU) and gpu2 (two) with the python3 of the machine, which
# needs the package's dependencies with a CUDA torch, pytest, and nvcc and cmake where no library is built. Arguments go
# to pytest; where there are files among them (tests/gpu/...), those run and no others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/link_packages.sh
[[ " $*" == *" tests/"* ]] || set -- tests/gpu "$@"
python3 -m pytest -q -m "gpu or gpu2" "$@"
