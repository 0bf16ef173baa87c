#!/usr/bin/env bash
# Offline build: a released checkpoint to engine directories, in both lowerings.
#
#     bash examples/build_engines.sh CHECKPOINT OUTPUT [RANKS]
#
# It needs no GPU with TensorRT-RTX; enterprise TensorRT builds for the GPU that it finds.
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
    echo "usage: bash $0 CHECKPOINT OUTPUT [RANKS]" >&2
    exit 2
fi
checkpoint=$1
output=$2
ranks=${3:-1}

# Once for each number of ranks: weights are cut, nothing is computed. The shards serve every build below.
# --dry-run, here and for dspark-build, tells sizes, memory and time before anything is written.
dspark-convert --checkpoint "$checkpoint" --output "$output/shards" --tp-size "$ranks"

# The released model's own arithmetic: FP8 and FP4 weights as released, quantised activations. Every custom
# operation is a plugin layer, so what runs these engines needs this package or its plugin library.
#   --max-batch-size   requests in flight; each takes a cache slot
#   --max-input-len    prompt tokens of one call, all requests together
#   --max-seq-len      positions that a request may reach
dspark-build --checkpoint "$output/shards" --output "$output/engines-plugin" \
    --lowering plugin --numerics released \
    --max-batch-size 8 --max-input-len 1024 --max-seq-len 4096

# Weights dequantised once, every operation spelled in TensorRT's own layers: needs no plugin library, and more
# memory. Its tokens may differ from the released numerics', as in any other precision.
dspark-build --checkpoint "$output/shards" --output "$output/engines-native" \
    --lowering native --numerics dequantized --dtype bfloat16 \
    --max-batch-size 8 --max-input-len 1024 --max-seq-len 4096

dspark-inspect "$output/engines-plugin"
dspark-inspect "$output/engines-native"
