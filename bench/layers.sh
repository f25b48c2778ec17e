#!/usr/bin/env bash
# Measures two kinds of layers on this machine: a mixture of experts against dense layers and against PyTorch, and Gated
# DeltaNet against attention at growing lengths. `bench/layers.sh --help` lists the options; bench/README.md describes it.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ " $* " != *" --ours "* && " $* " != *" --ours="* && " $* " != *" --help "* && " $* " != *" -h "* ]]; then
  cargo build --quiet --release -p mt-cli
  set -- --ours "${CARGO_TARGET_DIR:-target}/release/maxtext" "$@"
fi
exec python3 -B bench/layers.py "$@"
