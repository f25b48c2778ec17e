#!/usr/bin/env bash
# Measures saving and restoring 1.6 GB in memory (/dev/shm), against `dd` with the same number of streams and against
# Orbax, as medians of rounds. Needs 7 GB of memory, and Python with Orbax (PYTHON=…). ROUNDS=3 by default.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} rounds=${ROUNDS:-3} threads=$(nproc)
cargo build --quiet --release -p mt-checkpoint --example speed
speed=${CARGO_TARGET_DIR:-target}/release/examples/speed
directory=/dev/shm/maxtext-checkpoints-$$
figures=$(mktemp)
trap 'rm -rf "$directory" "$figures"' EXIT
mkdir -p "$directory"

# record NAME SECONDS BYTES
record() {
  echo "$1 $(echo "$3 / $2 / 1000000" | bc)" | tee -a "$figures"
}

# Writes or reads so many megabytes in as many streams as there are threads.
dd_streams() {
  local start end each=$((1536 / threads))
  start=$(date +%s.%N)
  for stream in $(seq "$threads"); do
    if [ "$1" = write ]; then
      dd if="$directory/source" of="$directory/dd$stream" bs=16M count=$((each / 16)) status=none &
    else
      dd if="$directory/dd$stream" of=/dev/null bs=16M status=none &
    fi
  done
  wait
  end=$(date +%s.%N)
  echo "$(echo "$end - $start" | bc) $((each * threads * 1048576))"
}

echo "load of the machine: $(cut -d' ' -f1-3 /proc/loadavg)"
head -c 805306368 /dev/urandom >"$directory/source"
for _ in $(seq "$rounds"); do
  # shellcheck disable=SC2046
  record dd-write $(dd_streams write)
  # shellcheck disable=SC2046
  record dd-read $(dd_streams read)
  rm -f "$directory"/dd*
  # shellcheck disable=SC2046
  record save $("$speed" save "$directory/ours" "$threads")
  # shellcheck disable=SC2046
  record restore $("$speed" restore "$directory/ours" "$threads")
  rm -rf "$directory/ours"
  # shellcheck disable=SC2046
  record orbax-save $("$python" bench/checkpoints.py save "$directory/orbax" 2>/dev/null)
  # shellcheck disable=SC2046
  record orbax-restore $("$python" bench/checkpoints.py restore "$directory/orbax" 2>/dev/null)
  rm -rf "$directory/orbax"
done
median() {
  awk -v name="$1" '$1 == name { print $2 }' "$figures" | sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'
}
echo "medians in MB/s:"
for name in save restore dd-write dd-read orbax-save orbax-restore; do echo "  $name $(median "$name")"; done
echo "save is $(echo "scale=2; $(median save) / $(median dd-write)" | bc) of dd, $(echo "scale=2; $(median save) / $(median orbax-save)" | bc) of Orbax"
echo "restore is $(echo "scale=2; $(median restore) / $(median dd-read)" | bc) of dd, $(echo "scale=2; $(median restore) / $(median orbax-restore)" | bc) of Orbax"
