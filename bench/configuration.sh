#!/usr/bin/env bash
# How long parsing and resolving a command line takes, in the release build. Fails above 20 ms.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo bench --quiet -p mt-config --bench resolve
