#!/usr/bin/env bash
# Compiles the runs of docs/ahead-of-time.md one after another and prints their table. Takes hours on two cores, and
# the plugin for TPUs, which `maxtext plugin install tpu` fetches.
#
#   bench/compile_table.sh [FILTER]     only runs whose name contains FILTER
#
# Reports stay in ${REPORTS:-target/compile_table}, and runs with a report are not compiled again. A run that takes
# longer than ${LIMIT:-3600} seconds is aborted.
set -uo pipefail
cd "$(dirname "$0")/.."
reports=${REPORTS:-target/compile_table}
limit=${LIMIT:-3600}
filter=${1:-}
maxtext=${MAXTEXT:-target/release/maxtext}
[[ -x $maxtext ]] || cargo build --release -p mt-cli || exit 1
mkdir -p "$reports"

# name | published MFU in percent | hardware | slices | keys
named="max_target_length=2048 remat_policy=full per_device_batch_size=1"
mixture="max_target_length=4096 remat_policy=full per_device_batch_size=1"
# Dense models: shape, batch, remat policy and mesh of MaxText's published configurations for these sizes. 1160B has no
# published configuration: it is 1024B with more and narrower layers, of a width that 240 and 384 divide.
dense="max_target_length=2048 attention=flash"
v5p() { echo "$dense global_parameter_scale=$1 per_device_batch_size=$2 remat_policy=$3 ici_tensor_parallelism=$4"; }
v5e() { echo "$dense global_parameter_scale=$1 per_device_batch_size=$2 remat_policy=$3"; }
runs=(
  "deepseek3-671b v5p-1024||v5p-1024|1|model_name=deepseek3-671b $mixture ici_fsdp_parallelism=128 ici_expert_parallelism=4"
  "qwen3-235b-a22b v5p-256||v5p-256|1|model_name=qwen3-235b-a22b $mixture ici_fsdp_parallelism=16 ici_expert_parallelism=8"
  "gpt-oss-120b v5p-128||v5p-128|1|model_name=gpt-oss-120b $mixture ici_fsdp_parallelism=16 ici_expert_parallelism=4"
  "llama4-17b-128e v5p-256||v5p-256|1|model_name=llama4-17b-128e $mixture ici_fsdp_parallelism=16 ici_expert_parallelism=8"
  "llama2-7b v5e-256||v5e-256|1|model_name=llama2-7b $named"
  "llama2-7b v5p-128||v5p-128|1|model_name=llama2-7b $named"
  "llama2-70b v5p-128||v5p-128|1|model_name=llama2-70b $named"
  "gemma2-27b v5p-8||v5p-8|1|model_name=gemma2-27b $named"
  "gemma2-27b v5p-16||v5p-16|1|model_name=gemma2-27b $named"
  "gemma2-27b v5p-32||v5p-32|1|model_name=gemma2-27b $named"
  "llama3.1-405b v5p-128||v5p-128|1|model_name=llama3.1-405b $named"
  "llama3.1-405b v5p-256||v5p-256|1|model_name=llama3.1-405b $named"
  "32B v5p-128|71.47|v5p-128|1|$(v5p 32 6 minimal 4)"
  "64B v5p-128|70.31|v5p-128|1|$(v5p 64 3 minimal 4)"
  "128B v5p-256|68.68|v5p-256|1|$(v5p 128 1 minimal 8)"
  "128B v5p-512|68.53|v5p-512|1|$(v5p 128 1 minimal 8)"
  "256B v5p-1024|68.82|v5p-1024|1|$(v5p 256 1 minimal 8)"
  "512B v5p-1024|63.99|v5p-1024|1|$(v5p 512 2 full 8)"
  "1024B v5p-2048|64.05|v5p-2048|1|$(v5p 1024 2 full 16)"
  "1024B v5p-4096|64.80|v5p-4096|1|$(v5p 1024 2 full 16)"
  "1160B v5p-7680|64.27|v5p-7680|1|$(v5p 1024 2 full 16) base_emb_dim=1920 base_num_decoder_layers=20"
  "1160B v5p-12288|66.23|v5p-12288|1|$(v5p 1024 2 full 16) base_emb_dim=1920 base_num_decoder_layers=20"
)
for slices in 1 2 4 8 16 32; do
  case $slices in
    1) mfu=(61.10 66.86 59.90 56.06) ;;
    2) mfu=(59.37 64.81 56.66 55.82) ;;
    4) mfu=(59.14 64.10 55.85 54.93) ;;
    8) mfu=(58.27 63.67 54.96 52.93) ;;
    16) mfu=(56.56 62.26 53.29 50.86) ;;
    32) mfu=(54.65 60.40 50.18 46.25) ;;
  esac
  runs+=(
    "16B ${slices}x v5e-256|${mfu[0]}|v5e-256|$slices|$(v5e 16 6 full)"
    "32B ${slices}x v5e-256|${mfu[1]}|v5e-256|$slices|$(v5e 32 4 full)"
    "64B ${slices}x v5e-256|${mfu[2]}|v5e-256|$slices|$(v5e 64 2 full)"
    "128B ${slices}x v5e-256|${mfu[3]}|v5e-256|$slices|$(v5e 128 1 qkv_proj_offloaded) ici_fsdp_parallelism=16 ici_tensor_parallelism=16"
  )
done

echo "| model and hardware | memory of a device | collectives of a step | step at best | MFU at best | published |"
echo "|---|---|---|---|---|---|"
for run in "${runs[@]}"; do
  IFS='|' read -r name published hardware slices keys <<<"$run"
  [[ $name == *"$filter"* ]] || continue
  file="$reports/${name// /_}.json"
  if [[ ! -s $file ]]; then
    # shellcheck disable=SC2086 # keys are words
    timeout "$limit" "$maxtext" compile --json "compile_topology=$hardware" \
      "compile_topology_num_slices=$slices" $keys >"$file.partial" 2>"$file.err"
    # Status 1 means that the run does not fit, which is a result.
    (($? < 2)) && mv "$file.partial" "$file"
  fi
  python3 - "$name" "$published" "$file" <<'PYTHON'
import json, os, sys
name, published, path = sys.argv[1:]
if not os.path.exists(path) or not os.path.getsize(path):
    print(f"| {name} | not compiled | | | | {published} |")
    sys.exit()
report = json.load(open(path))
program = report["programs"][0]
gib = lambda number: f"{number / 2**30:.1f} GiB"
if program["verdict"] == "fits":
    memory = f"{gib(program['memory']['needed'])} of {gib(report['device_memory'])}"
else:
    needed = program.get("needed")
    memory = f"does not fit: {gib(needed) if needed else 'more'} of {gib(report['device_memory'])}"
kinds = {}
for exchanged in program["exchanges"]:
    kinds[exchanged["kind"]] = kinds.get(exchanged["kind"], 0) + exchanged["bytes"]
collectives = ", ".join(f"{kind} {gib(size)}" for kind, size in sorted(kinds.items(), key=lambda kind: -kind[1])[:3])
times = program["times"]
step = f"{times['overlapped']:.2f} to {times['serial']:.2f} s" if times else ""
mfu = f"{100 * times['serial_utilization']:.0f} to {100 * times['utilization']:.0f} %" if times else ""
print(f"| {name} | {memory} | {collectives} | {step} | {mfu} | {published + ' %' if published else ''} |")
PYTHON
done
