#!/usr/bin/env bash
# Measures the peak memory of LoRA, and of DPO with adapters, on a published model of a billion bfloat16 parameters: relative
# to what `maxtext estimate` says, and of DPO relative to LoRA on as many tokens. Needs 2 GB of disk under TMPDIR and 4 GB of
# memory. `MAXTEXT=PROGRAM bench/tuning_memory.sh` measures a program that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${TMPDIR:-/tmp}/maxtext-import-benchmark
target=${CARGO_TARGET_DIR:-target}/release
[ -f "$directory/config.json" ] || {
  cargo build --quiet --release -p mt-models --example import
  "$target/examples/import" make "$directory"
}
[ -n "${MAXTEXT:-}" ] || cargo build --quiet --release -p mt-cli
maxtext=$(realpath "${MAXTEXT:-$target/maxtext}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python3 - "$scratch" << 'PYTHON'
import json, random, sys
drawn = random.Random(1)
text = lambda length: "".join(drawn.choice("abcdefghij klmnop") for _ in range(length))
for name, answers in [("conversations", ["completion"]), ("pairs", ["chosen", "rejected"])]:
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as file:
        for _ in range(64):
            print(json.dumps({"prompt": text(120)} | {answer: text(500) for answer in answers}), file=file)
PYTHON

keys=(
  "hf_model_path=$directory" tokenizer_type=byte weight_dtype=bfloat16 dtype=bfloat16 hardware=cpu
  lora.enable_lora=true lora.lora_rank=16 lora.lora_alpha=32 dataset_type=hf hf_path=json max_target_length=512
  enable_checkpointing=false enable_tensorboard=false eval_interval=-1 packing=false
)
run_keys=("base_output_directory=$scratch/runs" steps=4 run_name=memory)
sft=(use_sft=true "hf_train_files=$scratch/conversations.jsonl" "train_data_columns=[prompt,completion]")
dpo=(use_dpo=true "hf_train_files=$scratch/pairs.jsonl" "train_data_columns=[prompt,chosen,rejected]")

# measure NAME KEY…: prints the peak in bytes, and the estimate
measure() {
  local name=$1 peak estimate
  shift
  estimate=$("$maxtext" estimate --json "${keys[@]}" "$@" 2> /dev/null |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["device_memory"]["peak"])')
  /usr/bin/time -f %M -o "$scratch/peak" "$maxtext" train "${keys[@]}" "${run_keys[@]}" "$@" > /dev/null 2> "$scratch/log" ||
    { tail -5 "$scratch/log" >&2; exit 1; }
  rm -rf "$scratch/runs"
  peak=$(($(cat "$scratch/peak") * 1024))
  echo "$name $peak $estimate" >> "$scratch/figures"
  awk -v name="$name" -v peak="$peak" -v estimate="$estimate" \
    'BEGIN { printf "%-34s peak %.3f GB, estimate %.3f GB, ratio %.3f\n", name, peak / 1e9, estimate / 1e9, peak / estimate }'
}

echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
measure "LoRA, 1 sequence" per_device_batch_size=1 "${sft[@]}"
measure "LoRA, 2 sequences" per_device_batch_size=2 "${sft[@]}"
measure "DPO with adapters, 1 pair" per_device_batch_size=1 "${dpo[@]}"
awk '/^LoRA, 2/ { lora = $(NF-1) } /^DPO/ { printf "DPO against LoRA on two sequences: %.3f\n", $(NF-1) / lora }' "$scratch/figures"
