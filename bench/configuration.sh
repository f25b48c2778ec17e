#!/usr/bin/env bash
# Measures parsing and resolving a command line in the release build. Fails above 20 ms.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo bench --quiet -p mt-config --bench resolve
