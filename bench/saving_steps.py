"""Measures training steps while a checkpoint is saved in the background, against the same steps beside dd, which writes the
same bytes to the same disk: saving_steps.py --maxtext BINARY --directory DIRECTORY [--rounds 3] [KEY=VALUE…].

Keys describe the model; the default has 4 GB of state (weights and two moments of 340 million parameters). Each round runs
both once, and takes the median of the steps that lie wholly within the save or within dd. `base_emb_dim=64
base_num_decoder_layers=2 steps=40` tests the script in seconds.
"""

import argparse
import pathlib
import re
import shutil
import statistics
import subprocess

MODEL = [
    "dataset_type=synthetic", "dtype=float32", "base_emb_dim=1024", "base_num_decoder_layers=20", "base_mlp_dim=4096",
    "base_num_query_heads=16", "base_num_kv_heads=16", "head_dim=64", "vocab_size=4096", "max_target_length=32",
    "per_device_batch_size=1", "steps=30",
]
# The step behind which the save begins, and dd.
BEFORE = 5
LINE = re.compile(r"completed step: (\d+), seconds: ([0-9.]+)")

parser = argparse.ArgumentParser()
parser.add_argument("--maxtext", required=True)
parser.add_argument("--directory", required=True, type=pathlib.Path)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("keys", nargs="*")
options = parser.parse_args()


def steps(run, keys, begins, is_busy):
    """The seconds of the steps that begin and end while `is_busy`; `begins` is called behind step BEFORE."""
    command = [options.maxtext, "train", *MODEL, *options.keys, *keys]
    command += [f"run_name={run}", f"base_output_directory={options.directory}", "log_period=1", "eval_interval=-1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    taken, was_busy = [], False
    for line in process.stdout:
        found = LINE.search(line)
        if not found:
            continue
        if int(found[1]) == BEFORE:
            begins()
        busy = int(found[1]) >= BEFORE and is_busy()
        if busy and was_busy:
            taken.append(float(found[2]))
        was_busy = busy
    if process.wait() != 0:
        raise SystemExit(f"`{' '.join(command)}` failed")
    return taken


def saving():
    """The steps beside a save, and its bytes."""
    checkpoints = options.directory / "saving" / "checkpoints"
    is_busy = lambda: any(checkpoints.glob("*.orbax-checkpoint-tmp"))
    keys = [f"checkpoint_period={BEFORE}", "max_num_checkpoints_to_keep=1", "save_checkpoint_on_completion=false"]
    taken = steps("saving", keys, lambda: None, is_busy)
    newest = max(checkpoints.iterdir(), key=lambda path: path.stat().st_mtime)
    return taken, sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def beside_dd(size):
    writers = []
    blocks = max(1, size >> 24)
    target = options.directory / "dd"

    def is_busy():
        # dd writes as often as the other run saves.
        if writers and writers[-1].poll() is not None:
            return False
        return bool(writers)

    def begin():
        command = ["dd", "if=/dev/zero", f"of={target}", "bs=16M", f"count={blocks}", "conv=fsync", "status=none"]
        writers.append(subprocess.Popen(command))

    taken = steps("beside_dd", ["enable_checkpointing=false"], begin, is_busy)
    for writer in writers:
        writer.wait()
    target.unlink(missing_ok=True)
    return taken


options.directory.mkdir(parents=True, exist_ok=True)
ratios = []
for number in range(options.rounds):
    for run in ("saving", "beside_dd"):
        shutil.rmtree(options.directory / run, ignore_errors=True)
    saved, size = saving()
    other = beside_dd(size)
    if not saved or not other:
        raise SystemExit(f"no step lies within the save ({len(saved)}) or within dd ({len(other)}): use a larger model")
    pair = statistics.median(saved), statistics.median(other)
    ratios.append(pair[0] / pair[1])
    print(
        f"round {number}: {size / 1e9:.2f} GB; {pair[0]:.3f} s a step while saving ({len(saved)} steps), "
        f"{pair[1]:.3f} s beside dd ({len(other)} steps): {ratios[-1]:.3f}",
        flush=True,
    )
print(f"steps take {statistics.median(ratios):.3f} times as long while saving as beside dd")
