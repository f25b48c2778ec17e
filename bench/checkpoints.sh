#!/usr/bin/env bash
# Measures saving and restoring 1.6 GB in memory (/dev/shm), against `dd` with the same number of streams and against
# Orbax, as medians of rounds. Needs 7 GB of memory, and Python with Orbax (PYTHON=…). ROUNDS=3 by default; LAYERS=8 of
# 201 MB each are saved, and LAYERS=1 ROUNDS=1 tests the script.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} rounds=${ROUNDS:-3} layers=${LAYERS:-8} threads=$(nproc)
# Blocks of 16 MiB that each stream of dd writes.
blocks=$((192 * layers / 16 / threads))
cargo build --quiet --release -p mt-checkpoint --example speed
speed=${CARGO_TARGET_DIR:-target}/release/examples/speed
directory=/dev/shm/maxtext-checkpoints-$$
figures=$(mktemp)
trap 'rm -rf "$directory" "$figures"' EXIT
mkdir -p "$directory"

# record NAME SECONDS BYTES
record() {
  awk -v name="$1" -v seconds="$2" -v bytes="$3" 'BEGIN { printf "%s %.0f\n", name, bytes / seconds / 1e6 }' | tee -a "$figures"
}

# Writes or reads the same number of bytes in as many streams as there are threads.
dd_streams() {
  local start end
  start=$(date +%s.%N)
  for stream in $(seq "$threads"); do
    if [ "$1" = write ]; then
      dd if="$directory/source" of="$directory/dd$stream" bs=16M count=$blocks status=none &
    else
      dd if="$directory/dd$stream" of=/dev/null bs=16M status=none &
    fi
  done
  wait
  end=$(date +%s.%N)
  awk -v start="$start" -v end="$end" -v blocks=$((blocks * threads)) 'BEGIN { print end - start, blocks * 16 * 1048576 }'
}

echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
head -c $((blocks * 16 * 1048576)) /dev/urandom >"$directory/source"
for _ in $(seq "$rounds"); do
  # shellcheck disable=SC2046
  record dd-write $(dd_streams write)
  # shellcheck disable=SC2046
  record dd-read $(dd_streams read)
  rm -f "$directory"/dd*
  # shellcheck disable=SC2046
  record save $("$speed" save "$directory/ours" "$threads" "$layers")
  # shellcheck disable=SC2046
  record restore $("$speed" restore "$directory/ours" "$threads" "$layers")
  rm -rf "$directory/ours"
  # shellcheck disable=SC2046
  record orbax-save $("$python" bench/checkpoints.py save "$directory/orbax" "$layers" 2>"$directory/errors" || cat "$directory/errors" >&2)
  # shellcheck disable=SC2046
  record orbax-restore $("$python" bench/checkpoints.py restore "$directory/orbax" "$layers" 2>"$directory/errors" || cat "$directory/errors" >&2)
  rm -rf "$directory/orbax"
done
median() {
  awk -v name="$1" '$1 == name { print $2 }' "$figures" | sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'
}
echo "medians in MB/s:"
for name in save restore dd-write dd-read orbax-save orbax-restore; do echo "  $name $(median "$name")"; done
quotient() { awk -v one="$(median "$1")" -v other="$(median "$2")" 'BEGIN { printf "%.2f", one / other }'; }
echo "save is $(quotient save dd-write) of dd, $(quotient save orbax-save) of Orbax"
echo "restore is $(quotient restore dd-read) of dd, $(quotient restore orbax-restore) of Orbax"
