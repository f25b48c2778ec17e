"""Measures this program and its peers in alternation. `bench/peers.sh` calls it. Needs only the standard library."""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import table
import tuning
from contestants import CONTESTANTS, HERE, Arena, Failed, Job

STEP_ROWS = {"bf16-step": "bfloat16", "f32-step": "float32"}
DECODE_ROWS = {"f32-decode": "float32", "bf16-decode": "bfloat16"}
PREFILL_ROWS = {"f32-prefill": "float32", "bf16-prefill": "bfloat16"}
ROWS = [*STEP_ROWS, "start", *DECODE_ROWS, *PREFILL_ROWS, "losses", *tuning.MODELS]
# The number of steps with compared losses, and the largest difference in float32.
LOSS_STEPS, LOSS_TOLERANCE = 10, 1e-3
# The load average above which the machine counts as busy.
BUSY = 0.5
# Warm-up steps, which are not counted: they compile programs and touch memory for the first time.
WARMING = 2


def arguments():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="bench/peers.sh", description="Measures this program beside its peers.")
    parser.add_argument("--ours", type=Path, required=True, help="the program (built if this is left out)")
    parser.add_argument("--ours-key", action="append", default=[], metavar="KEY=VALUE", help="a key for it, repeatable")
    parser.add_argument("--rows", default=",".join(ROWS), help="the measurements: %(default)s")
    parser.add_argument("--only", default=",".join(one.name for one in CONTESTANTS), help="contestants: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each process (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="training steps or prompts of a process (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of two steps, as a test of the setup")
    parser.add_argument(
        "--choose",
        default=None,
        metavar="NAMES",
        help="contestants whose settings are measured again, or `none`; by default, peers without settings",
    )
    parser.add_argument(
        "--environment", type=Path, default=cache / "maxtext-peers", help="the directory of the peers: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures (peers.json in the environment)")
    asked = parser.parse_args()
    asked.rows, asked.only = asked.rows.split(","), asked.only.split(",")
    names = [one.name for one in CONTESTANTS]
    chosen = asked.choose.split(",") if asked.choose else []
    for given, known in [(asked.rows, ROWS), (asked.only, names), (chosen, [*names, "none"])]:
        if unknown := set(given) - set(known):
            parser.error(f"`{', '.join(sorted(unknown))}` is none of {', '.join(known)}")
    if asked.quick:
        asked.rounds, asked.steps = 1, 2
    if not os.access(asked.ours, os.X_OK):
        parser.error(f"`{asked.ours}` is no program")
    asked.ours = asked.ours.resolve()
    return asked


def prepared(asked):
    """Creates the peers' environment and the input files, unless they exist."""
    directory = asked.environment
    directory.mkdir(parents=True, exist_ok=True)
    python = directory / "venv" / "bin" / "python"
    requirements = HERE / "requirements.txt"

    def once(name, sources, make):
        digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        made = directory / name
        if not made.exists() or made.read_text() != digest:
            make()
            made.write_text(digest)

    def environment():
        say(f"installing the peers in {directory}; llama.cpp is compiled, which takes minutes")
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)

    def files():
        (directory / "files").mkdir(exist_ok=True)
        for program in ["inputs.py", "tuning.py"]:
            subprocess.run([python, "-B", HERE / program, directory / "files"], check=True)

    once("installed", [requirements], environment)
    once("written", [HERE / "inputs.py", HERE / "model.py", HERE / "tuning.py"], files)
    return Arena(python, directory / "files", asked.ours, asked.ours_key)


def say(text):
    print(text, file=sys.stderr, flush=True)


class Choices:
    """The fastest settings of each contestant, for each kind of work and type. A file keeps them."""

    def __init__(self, arena, asked):
        self.arena = arena
        self.file = asked.environment / "choices.json"
        self.known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.asked = asked.choose.split(",") if asked.choose else None
        self.fresh = set()
        self.caches = asked.environment / "caches"

    def of(self, contestant, kind, dtype):
        offered = contestant.choices[kind]
        first = {name: values[0] for name, values in offered.items()}
        if kind == "start":
            first = self.of(contestant, "train", dtype)
        key = f"{contestant.name} {kind} {dtype}"
        kept = self.known.get(key)
        usable = kept is not None and all(kept.get(name) in values for name, values in offered.items())
        if self.asked is None:
            measures = contestant.name != "ours" and not usable
        else:
            measures = contestant.name in self.asked and key not in self.fresh
        if measures:
            self.known[key] = self.measured(contestant, kind, dtype, first)
            self.fresh.add(key)
            self.file.write_text(json.dumps(self.known, indent=2))
        elif not usable:
            return first
        return self.known[key]

    def measured(self, contestant, kind, dtype, first):
        """Tries one setting after the other, and keeps the fastest value of each."""
        say(f"what is best for {contestant.title}, {kind} in {dtype}:")

        def least(variant):
            try:
                seconds = self.seconds(contestant, kind, dtype, variant)
            except Failed as failure:
                say(f"  {variant}: {failure}")
                return float("inf")
            say(f"  {variant}: {seconds:.4f} s")
            return seconds

        best, least_seconds = first, least(first)
        for name, values in contestant.choices[kind].items():
            base = best
            for value in values:
                if value != base[name]:
                    variant = {**base, name: value}
                    if (seconds := least(variant)) < least_seconds:
                        best, least_seconds = variant, seconds
        return best


    def seconds(self, contestant, kind, dtype, variant):
        """The least time of a step, of a token or of reading a prompt, the mean time of a trained token, or the times of two
        starts, cold and warm.
        """
        if kind == "start":
            with tempfile.TemporaryDirectory(prefix="maxtext-peers-") as empty:
                job = Job("train", dtype, 1, False, Path(empty))
                return sum(self.arena.run(contestant.name, job, variant).first_step for _ in range(2))
        job = Job(kind, dtype, 2 if kind == "decode" else 4, kind != "train", self.caches)
        if kind in tuning.MODELS:
            outcome = self.arena.run(contestant.name, job, variant)
            return 1 / table.rate(outcome.rates[1:], outcome.seconds[1:])
        # A process does not report the first time that it reads a prompt.
        return min(self.arena.run(contestant.name, job, variant).seconds[0 if kind == "prefill" else 1 :])


class Measurements:
    def __init__(self, asked, arena):
        self.asked, self.arena = asked, arena
        self.choices = Choices(arena, asked)
        self.runs = []
        self.number = None

    def run(self, contestant, row, job, variant):
        say(f"  {row}: {contestant.title}")
        try:
            outcome = self.arena.run(contestant.name, job, variant)
        except Failed as failure:
            say(f"  {row}: {contestant.title}: {failure}")
            self.runs.append({"row": row, "contestant": contestant.name, "failure": str(failure)})
            return
        if contestant.name == "ours":
            variant = variant | dict(key.split("=", 1) for key in self.asked.ours_key)
        run = {"row": row, "round": self.number, "contestant": contestant.name, "variant": variant}
        self.runs.append({**run, **vars(outcome)})

    def take_part(self, kind, number=0):
        """The contestants for a kind of work, rotated by one in each round."""
        able = [one for one in CONTESTANTS if one.name in self.asked.only and kind in one.choices]
        start = number % max(len(able), 1)
        return able[start:] + able[:start]

    def round(self, number):
        rows, caches, self.number = self.asked.rows, self.choices.caches, number
        for row in [row for row in STEP_ROWS if row in rows]:
            for one in self.take_part("train", number):
                job = Job("train", STEP_ROWS[row], WARMING + self.asked.steps, False, caches)
                self.run(one, row, job, self.choices.of(one, "train", STEP_ROWS[row]))
        if "start" in rows:
            for one in self.take_part("train", number):
                variant = self.choices.of(one, "start", "bfloat16")
                empty = Path(tempfile.mkdtemp(prefix="maxtext-peers-"))
                for row in ["cold-start", "warm-start"]:
                    self.run(one, row, Job("train", "bfloat16", 1, False, empty), variant)
                shutil.rmtree(empty)
        for row in [row for row in DECODE_ROWS if row in rows]:
            for one in self.take_part("decode", number):
                job = Job("decode", DECODE_ROWS[row], 2, True, caches)
                self.run(one, row, job, self.choices.of(one, "decode", DECODE_ROWS[row]))
        for row in [row for row in PREFILL_ROWS if row in rows]:
            for one in self.take_part("prefill", number):
                job = Job("prefill", PREFILL_ROWS[row], self.asked.steps, True, caches)
                self.run(one, row, job, self.choices.of(one, "prefill", PREFILL_ROWS[row]))
        for row in [row for row in tuning.MODELS if row in rows]:
            for one in self.take_part(row, number):
                job = Job(row, "bfloat16", WARMING + self.asked.steps, True, caches)
                self.run(one, row, job, self.choices.of(one, row, "bfloat16"))

    def losses(self):
        for row, dtype in {"f32-losses": "float32", "bf16-losses": "bfloat16"}.items():
            for one in self.take_part("train"):
                job = Job("train", dtype, LOSS_STEPS, True, self.choices.caches)
                self.run(one, row, job, self.choices.of(one, "train", dtype))


def differences(runs, row):
    """The largest difference of each contestant's losses from JAX's; infinite if their numbers differ."""
    losses = {run["contestant"]: run["losses"] for run in runs if run["row"] == row and "losses" in run}
    if "jax" not in losses:
        return {}
    return {
        name: max(abs(mine - theirs) for mine, theirs in zip(values, losses["jax"]))
        if len(values) == len(losses["jax"])
        else float("inf")
        for name, values in losses.items()
    }


def commit():
    """The commit of the scripts, and whether the working tree has changes."""
    command = ["git", "-C", HERE, "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True)
    return described.stdout.strip() or None


def main():
    asked = arguments()
    arena = prepared(asked)
    measurements = Measurements(asked, arena)
    machine = table.machine(arena.python)
    loads = [os.getloadavg()[0]]
    if loads[0] > BUSY:
        say(f"the machine is not idle, or was not a minute ago: its load is {loads[0]:.1f}")
    # Settings are chosen before the rounds, so that the rounds follow one another without a pause.
    tuned = {kind: {kind: "bfloat16"} for kind in tuning.MODELS}
    kinds = {
        "train": STEP_ROWS,
        "start": {"start": "bfloat16"},
        "decode": DECODE_ROWS,
        "prefill": PREFILL_ROWS,
        **tuned,
    }
    for kind, rows in kinds.items():
        for one in measurements.take_part(kind):
            for dtype in sorted({dtype for row, dtype in rows.items() if row in asked.rows}):
                measurements.choices.of(one, kind, dtype)
    for number in range(asked.rounds):
        say(f"round {number + 1} of {asked.rounds}, load of the machine: {os.getloadavg()[0]:.1f}")
        measurements.round(number)
    if "losses" in asked.rows:
        say("losses")
        measurements.losses()
    loads.append(os.getloadavg()[0])

    runs = measurements.runs
    report = {
        "date": datetime.date.today().isoformat(),
        "command": "bench/peers.sh " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "machine": machine,
        "load": loads,
        "choices": measurements.choices.known,
        "differences": {row: differences(runs, row) for row in ["f32-losses", "bf16-losses"]},
        "runs": runs,
    }
    file = asked.json or asked.environment / "peers.json"
    file.write_text(json.dumps(report, indent=1))
    say(f"all figures: {file}")
    print(table.markdown(report, WARMING))
    failures = sorted({f"{run['contestant']} failed" for run in runs if "failure" in run})
    if "losses" in asked.rows and {"ours", "jax"} <= set(asked.only):
        apart = report["differences"]["f32-losses"].get("ours", float("inf"))
        # NaN does not meet the tolerance either.
        if not apart <= LOSS_TOLERANCE:
            failures.append(f"losses are {apart:.1e} apart, more than {LOSS_TOLERANCE:.1e}")
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
