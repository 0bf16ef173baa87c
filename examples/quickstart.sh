#!/usr/bin/env bash
# From a fresh clone to speculative decoding on two ranks; no GPU needed. Run it with: bash examples/quickstart.sh
# It keeps its Python environment in .venv and everything else in build/quickstart, which it empties first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=build/quickstart
ranks=2

step() { printf '\n== %s\n' "$*"; }

# Open MPI refuses root, and more ranks than cores, unless told otherwise; other MPIs know no such flags.
mpirun_flags() {
    [[ $(mpirun --version 2>&1) == *"Open MPI"* ]] || return 0
    [[ $(id -u) -ne 0 ]] || echo --allow-run-as-root
    [[ $(nproc) -ge $1 ]] || echo --oversubscribe
}

step "1/5  Python environment in .venv"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || version="not there"
if [[ ! $version =~ ^3\.1[0-3]$ ]]; then
    echo "$python is $version, Python 3.10 to 3.13 is needed; name one with: PYTHON=python3.12 bash $0" >&2
    exit 2
fi
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
# shellcheck disable=SC1091
source .venv/bin/activate
# torch first and by its exact version: where the package index offers a CPU build of it, pip takes that one.
python -m pip install --quiet --disable-pip-version-check torch==2.13.0
python -m pip install --quiet --disable-pip-version-check --editable '.[rtx,mpi,compare,plot]'

started=$SECONDS
rm -rf "$out"
mkdir -p "$out"

step "2/5  the tiny checkpoint, cut for $ranks ranks"
dspark-convert --checkpoint examples/tiny/checkpoint --output "$out/shards" --tp-size $ranks

step "3/5  one TensorRT engine for the draft and one for the target, for each rank"
dspark-build --checkpoint "$out/shards" --output "$out/engines" --lowering plugin --numerics released

step "4/5  what was built"
dspark-inspect "$out/engines"

step "5/5  speculative decoding on $ranks ranks, and once more without drafts"
head -n 4 examples/prompts.txt > "$out/prompts.txt"
read -ra flags <<< "$(mpirun_flags $ranks | tr '\n' ' ')"
mpirun "${flags[@]}" -n $ranks python examples/run.py --engine-dir "$out/engines" \
    --prompts-file "$out/prompts.txt" --max-output-len 64 --compare-target-only --device cpu \
    --stats-json "$out/stats.json" --plot "$out/acceptance.png"

step "done in $((SECONDS - started)) s. What you have now"
cat << EOF
  $out/engines          engine directory: a plan for each network and rank, its header, weights, tokenizer
  $out/stats.json       tokens per step, accepted tokens by position, the identity with target-only decoding
  $out/acceptance.png   accepted tokens by position, drawn

Go on, after: source .venv/bin/activate
  mpirun ${flags[*]:+${flags[*]} }-n $ranks python examples/run.py --engine-dir $out/engines --prompt "It was a" --stream
  python examples/compare_accuracy.py --checkpoint examples/tiny/checkpoint
EOF
