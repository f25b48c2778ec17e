#!/usr/bin/env bash
# Measures tracing, differentiating and printing the training step of llama3.1-405b for 128 devices, with scanned and
# with unrolled layers, in five runs each. If PYTHON has jax and optax, also measures JAX for a model of the same size.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --quiet --release -p mt-plan --example trace
trace=${CARGO_TARGET_DIR:-target}/release/examples/trace
model=(model_name=llama3.1-405b dataset_type=synthetic max_target_length=8192 per_device_batch_size=1)

echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
"$trace" 5 "${model[@]}" scan_layers=true | sed 's/^/scanned: /'
"$trace" 5 "${model[@]}" scan_layers=false | sed 's/^/unrolled: /'
if [ -n "${PYTHON:-}" ]; then
  "$PYTHON" bench/trace_jax.py 5
else
  echo "JAX is skipped: PYTHON names no interpreter with jax and optax"
fi
echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
