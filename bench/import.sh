#!/usr/bin/env bash
# How long a published model of a billion bfloat16 parameters takes to load, against `cat` of its files, and the memory
# that loading needs, against the size of the weights. Needs 2 GB of disk under TMPDIR and 3 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${TMPDIR:-/tmp}/maxtext-import-benchmark
cargo build --quiet --release -p mt-models --example import
import=${CARGO_TARGET_DIR:-target}/release/examples/import
[ -f "$directory/config.json" ] || "$import" make "$directory"

# Both find the files in the page cache, so that the disk does not decide.
cat "$directory"/*.safetensors > /dev/null
for round in 1 2 3; do
  start=$(date +%s.%N)
  cat "$directory"/*.safetensors > /dev/null
  end=$(date +%s.%N)
  cat_seconds=$(echo "$end - $start" | bc)
  line=$("$import" load "$directory")
  echo "round $round: cat $cat_seconds s; import $line" | awk '{
    ratio = $7 / $4; memory = $(NF-1) / $10;
    printf "%s\n          time %.2f of cat, memory %.2f of the weights\n", $0, ratio, memory }'
done
