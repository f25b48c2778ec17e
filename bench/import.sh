#!/usr/bin/env bash
# Measures loading a published model of a billion bfloat16 parameters: the time relative to `cat` of its files, and the
# peak memory relative to the size of the weights, as medians of three rounds. Needs 2 GB of disk under TMPDIR and 7 GB
# of memory, 2 of them in /dev/shm.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=${TMPDIR:-/tmp}/maxtext-import-benchmark
cargo build --quiet --release -p mt-models --example import
import=${CARGO_TARGET_DIR:-target}/release/examples/import
[ -f "$directory/config.json" ] || "$import" make "$directory"
copy=/dev/shm/maxtext-import-benchmark-$$
figures=$(mktemp)
trap 'rm -f "$copy" "$figures"' EXIT

drop_page_cache() {
  sync
  echo 3 2> /dev/null > /proc/sys/vm/drop_caches
}

# record NAME SECONDS [BYTES OF WEIGHTS, BYTES OF PEAK MEMORY]
record() {
  echo "$*" | tee -a "$figures"
}

# The time of a `cat` into a file.
cat_into() {
  local start end
  start=$(date +%s.%N)
  cat "$directory"/*.safetensors > "$2"
  end=$(date +%s.%N)
  record "$1" "$(echo "$end - $start" | bc)"
}

# The program's own measurement, which excludes starting the program and the plugin.
run() {
  record "$1" "$("$import" "$2" "$directory" | awk '{ print $1, $4, $(NF-1) }')"
}

echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
for round in 1 2 3; do
  echo "round $round"
  # Reads the files into the page cache, so that the disk does not affect the times.
  cat "$directory"/*.safetensors > /dev/null
  cat_into warm-cat /dev/null
  cat_into warm-cat-to-memory "$copy"
  rm -f "$copy"
  # Each run reuses the memory that the previous one has just freed, which is the fastest memory to get.
  run warm-floor floor
  run warm-import load
  run warm-import-again again
  # A virtual machine may return free memory to its host within a second, and must then request it again.
  sleep 5
  run warm-after-pause-floor floor
  sleep 5
  run warm-after-pause-import load
  if drop_page_cache; then
    cat_into cold-cat /dev/null
    drop_page_cache
    run cold-floor floor
    drop_page_cache
    run cold-import load
  else
    echo "cold rounds are skipped: this machine does not permit dropping the page cache"
  fi
done
echo "medians"
for name in $(awk '{ print $1 }' "$figures" | sort -u); do
  middle=$(grep "^$name " "$figures" | sort -k2,2n | sed -n 2p)
  cat_seconds=$(grep "^${name%%-*}-cat " "$figures" | sort -k2,2n | sed -n 2p | awk '{ print $2 }')
  echo "$middle" | awk -v cat="$cat_seconds" '{
    memory = NF > 2 ? sprintf(", memory %.3f of the weights", $4 / $3) : ""
    printf "%-24s %.2f s, %.1f of cat%s\n", $1, $2, $2 / cat, memory }'
done
echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
