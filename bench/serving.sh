#!/usr/bin/env bash
# Measures serving beside llama.cpp on this machine, in alternation, and prints a table.
# `bench/serving.sh --help` lists the options; bench/README.md describes the comparison.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ " $* " != *" --ours "* && " $* " != *" --ours="* && " $* " != *" --help "* && " $* " != *" -h "* ]]; then
  cargo build --quiet --release -p mt-cli
  set -- --ours "${CARGO_TARGET_DIR:-target}/release/maxtext" "$@"
fi
exec python3 -B bench/peers/serving.py "$@"
