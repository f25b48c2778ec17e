"""The table of measurements."""

import platform
import statistics
import subprocess

from contestants import CONTESTANTS, THREADS

PACKAGES = ["jax", "optax", "torch", "llama_cpp_python", "transformers", "trl", "peft"]
# The unit of values of which more is better.
RATE = "trained tokens/s"


def machine(python):
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    code = f"""from importlib.metadata import packages_distributions, version
installed = {{one for names in packages_distributions().values() for one in names}}
for name in {PACKAGES}: print(name, version(name) if {{name, name.replace("_", "-")}} & installed else "none")"""
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": THREADS,
        "versions": dict(line.split() for line in versions.splitlines()),
    }


def figures(runs, row, value):
    """For each contestant, the median of a value over its runs of a row."""
    found = {}
    for run in runs:
        if run["row"] == row and "failure" not in run:
            found.setdefault(run["contestant"], []).extend(value(run))
    return {name: statistics.median(values) for name, values in found.items()}


def ratios(runs, row, value, peer):
    """For each round, the ratio of this program's median to that of a peer."""
    numbers = sorted({run["round"] for run in runs if run["row"] == row and "failure" not in run})
    for number in numbers:
        found = figures([run for run in runs if run.get("round") == number], row, value)
        if {"ours", peer} <= set(found):
            yield found["ours"] / found[peer]


def rate(rates, seconds):
    """The rate of steps together, from the rate and the seconds of each."""
    return sum(one * time for one, time in zip(rates, seconds, strict=True)) / sum(seconds)


def rows(warming):
    def steps(run):
        return run["seconds"][warming:]

    def answers(run):
        return [1000 * seconds for seconds in run["seconds"][1:]]

    def prompts(run):
        return [1000 * statistics.median(run["seconds"])]

    def first(run):
        return [run["first_step"]]

    def rates(run):
        # Batches differ in their numbers of tokens.
        return [rate(run["rates"][warming:], run["seconds"][warming:])]

    def peak(run):
        return [run["peak_bytes"] / 1e9]

    return [
        ("bf16 step", "s", "bf16-step", steps),
        ("f32 step", "s", "f32-step", steps),
        ("time to first step, cold", "s", "cold-start", first),
        ("time to first step, with cached programs", "s", "warm-start", first),
        ("peak memory, bf16 step", "GB", "bf16-step", peak),
        ("peak memory, f32 step", "GB", "f32-step", peak),
        ("peak memory, cold start", "GB", "cold-start", peak),
        ("decode, one sequence, f32", "ms a token", "f32-decode", answers),
        ("decode, one sequence, bf16", "ms a token", "bf16-decode", answers),
        ("peak memory, decode in bf16", "GB", "bf16-decode", peak),
        ("prefill of 512 tokens, f32", "ms", "f32-prefill", prompts),
        ("prefill of 512 tokens, bf16", "ms", "bf16-prefill", prompts),
        ("full fine-tuning of 66M", RATE, "sft", rates),
        ("LoRA of 0.5B", RATE, "lora", rates),
        ("DPO of 66M", RATE, "dpo", rates),
        ("peak memory, full fine-tuning", "GB", "sft", peak),
        ("peak memory, LoRA", "GB", "lora", peak),
        ("peak memory, DPO", "GB", "dpo", peak),
    ]


def number(value):
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def markdown(report, warming):
    runs = report["runs"]
    present = {run["contestant"] for run in runs}
    shown = [one for one in CONTESTANTS if one.name in present]
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    loads = " to ".join(f"{load:.1f}" for load in report["load"])
    lines = [
        f"{report['date']}, {machine['processor']}, {machine['threads']} threads, load {loads}; {versions}; "
        f"`{report['command']}` at {report['commit']}",
        "",
        "| | " + " | ".join(one.title for one in shown) + " | against the best peer, by rounds |",
        "|---" * (len(shown) + 2) + "|",
    ]
    for title, unit, row, value in rows(warming):
        found = figures(runs, row, value)
        if not found:
            continue
        cells = [f"{number(found[one.name])} {unit}" if one.name in found else "" for one in shown]
        peers = {peer: median for peer, median in found.items() if peer != "ours"}
        ratio = ""
        best = max if unit == RATE else min
        if peers and "ours" in found and (each := list(ratios(runs, row, value, best(peers, key=peers.get)))):
            ratio = f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {ratio} |")
    for row, title in {dtype + "-losses": f"distance of 10 losses from JAX's, {dtype}" for dtype in ["f32", "bf16"]}.items():
        if apart := report["differences"][row]:
            cells = [f"{apart[one.name]:.1e}" if one.name in apart else "" for one in shown]
            lines.append(f"| {title} | " + " | ".join(cells) + " | |")
    lines += agreement(runs)
    return "\n".join(lines)


def agreement(runs):
    """The number of tokens in which contestants agree in float32."""
    tokens = {run["contestant"]: run["tokens"] for run in runs if run["row"] == "f32-decode" and run.get("tokens")}
    if "ours" not in tokens:
        return []
    lines = [""]
    for name, theirs in tokens.items():
        if name != "ours":
            pairs = zip(tokens["ours"], theirs)
            alike = next((index for index, (mine, other) in enumerate(pairs) if mine != other), len(theirs))
            lines.append(f"The first {alike} of {len(theirs)} tokens in float32 are those of {name}.")
    return lines
