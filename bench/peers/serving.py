"""Measures this program's server beside llama.cpp in alternation. `bench/serving.sh` calls it. Needs only the standard
library.
"""

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import model
import table
from contestants import HERE, THREADS, Failed
from run import BUSY, commit, prepared, say

TYPES = {"f32": "float32", "bf16": "bfloat16"}
SEQUENCES = [1, 8, 32]
PROMPT, ANSWER = 128, 128
# The prompt whose first token is timed, and the beginning that is repeated.
FIRST, PREFIX = 512, 2000
# The settings of llama.cpp. The first value of each is used until values have been measured.
LLAMA = {
    "threads": [THREADS, max(THREADS // 2, 1)],
    "attention": ["fused", "plain"],
    "cache": ["float16", "float32", "bfloat16"],
    "batch": [512, 128, 2048],
    "cells": ["own", "shared"],
}


def arguments():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="bench/serving.sh", description="Measures serving beside llama.cpp.")
    parser.add_argument("--ours", type=Path, required=True, help="the program (built if this is left out)")
    parser.add_argument("--ours-key", action="append", default=[], metavar="KEY=VALUE", help="a key for it, repeatable")
    parser.add_argument("--types", default=",".join(TYPES), help="the types: %(default)s")
    parser.add_argument("--only", default="ours,llama", help="contestants: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each process (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="loads of a process, the best of which counts (%(default)s)")
    parser.add_argument("--choose", action="store_true", help="measure the settings of llama.cpp again")
    parser.add_argument(
        "--environment", type=Path, default=cache / "maxtext-peers", help="the directory of the peers: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures (serving.json in the environment)")
    asked = parser.parse_args()
    asked.types, asked.only = asked.types.split(","), asked.only.split(",")
    for given, known in [(asked.types, list(TYPES)), (asked.only, ["ours", "llama"])]:
        if unknown := set(given) - set(known):
            parser.error(f"`{', '.join(sorted(unknown))}` is none of {', '.join(known)}")
    asked.ours = asked.ours.resolve()
    return asked


class Llama:
    """llama.cpp, with the fastest settings."""

    def __init__(self, arena, asked):
        self.arena, self.asked = arena, asked
        self.file = asked.environment / "serving-choices.json"
        self.known = json.loads(self.file.read_text()) if self.file.exists() and not asked.choose else {}

    def run(self, dtype, variant, sequences, first, repetitions, seed, answer=ANSWER):
        """The least seconds of each row."""
        work = {
            "weights": str(self.arena.files / f"{TYPES[dtype]}.gguf"),
            "variant": variant,
            "threads": THREADS,
            "sequences": sequences,
            "prompt": PROMPT,
            "answer": answer,
            "first": first,
            "repetitions": repetitions,
            "seed": seed,
        }
        command = [self.arena.python, HERE / "llama_serve.py", json.dumps(work)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"llama.cpp ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        found = {}
        for line in done.stdout.splitlines():
            if line.startswith('{"step"'):
                event = json.loads(line)
                found[event["row"]] = min(event["seconds"], found.get(event["row"], float("inf")))
        return found

    def choose(self, dtype):
        """Tries one setting after the other for each row, and keeps the fastest value of each."""
        for row in [*map(str, SEQUENCES), "first"]:
            key = f"{dtype} {row}"
            if key in self.known:
                continue
            sequences, first = ([], FIRST) if row == "first" else ([int(row)], 0)

            def least(variant):
                try:
                    # A quarter of an answer shows what is fastest.
                    return self.run(dtype, variant, sequences, first, 2, 0, ANSWER // 4)[row]
                except Failed as failure:
                    say(f"  {variant}: {failure}")
                    return float("inf")

            best = {name: values[0] for name, values in LLAMA.items()}
            if (seconds := least(best)) == float("inf"):
                raise Failed("llama.cpp does not run")
            for name, values in LLAMA.items():
                base = best
                for value in values:
                    if value != base[name] and (other := least({**base, name: value})) < seconds:
                        best, seconds = {**base, name: value}, other
            say(f"best for llama.cpp, {key}: {best}, {seconds:.3f} s")
            self.known[key] = best
            self.file.write_text(json.dumps(self.known, indent=2))

    def round(self, dtype, seed):
        found = {}
        for row in map(str, SEQUENCES):
            found |= self.run(dtype, self.known[f"{dtype} {row}"], [int(row)], 0, self.asked.repetitions, seed)
        return found | self.run(dtype, self.known[f"{dtype} first"], [], FIRST, self.asked.repetitions, seed)


class Server:
    """This program's server."""

    def __init__(self, arena, asked, dtype):
        keys = {
            "hf_model_path": arena.files / "model",
            "dtype": TYPES[dtype],
            "weight_dtype": TYPES[dtype],
            "hardware": "cpu",
            "add_bos": "false",
            "max_target_length": 2048,
            "enable_model_warmup": "true",
            "jax_cache_dir": asked.environment / "caches" / "ours",
        }
        words = [f"{key}={value}" for key, value in keys.items()] + asked.ours_key
        start = time.perf_counter()
        command = [str(word) for word in [asked.ours, "serve", *words, "--port", "0"]]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        told = []
        for line in self.process.stderr:
            told.append(line)
            if found := re.search(r"is ready at http://([\d.]+):(\d+)", line):
                self.address = found[1], int(found[2])
                break
        else:
            raise Failed("the server does not start:\n" + "".join(told[-20:]))
        self.start = time.perf_counter() - start
        # Nobody reads the log, which would fill the pipe.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def close(self):
        self.process.terminate()
        self.process.wait()

    def ask(self, prompt, answer, streamed):
        """The seconds to the first token of a stream, or to the end of an answer."""
        body = {
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
        }
        connection = http.client.HTTPConnection(*self.address, timeout=600)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if streamed:
            reply.readline()
            seconds = time.perf_counter() - start
            reply.read()
        else:
            made = json.loads(reply.read())
            seconds = time.perf_counter() - start
            if reply.status != 200 or made["usage"]["completion_tokens"] != answer:
                raise Failed(f"status {reply.status}: {made}")
        connection.close()
        return seconds

    def load(self, prompts):
        """The seconds until answers to prompts that arrive together are complete."""
        failures = []

        def ask(prompt):
            try:
                self.ask(prompt, ANSWER, False)
            except Exception as failure:
                failures.append(failure)

        threads = [threading.Thread(target=ask, args=[prompt]) for prompt in prompts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return time.perf_counter() - start


def measured(arena, asked, dtype, seed):
    """The least seconds of each row of this program."""
    generator = random.Random(seed)

    def prompt(length):
        return [generator.randrange(3, model.VOCAB) for _ in range(length)]

    server = Server(arena, asked, dtype)
    try:
        # Text of answers has words that only the first answers look up.
        server.ask(prompt(PROMPT), 8, False)
        found = {"start": server.start}
        times = range(asked.repetitions)
        for number in SEQUENCES:
            found[str(number)] = min(server.load([prompt(PROMPT) for _ in range(number)]) for _ in times)
        found["first"] = min(server.ask(prompt(FIRST), 2, True) for _ in times)
        prefixes = [prompt(PREFIX) for _ in times]
        found["prefix"] = min(server.ask(prefix + prompt(8), 2, True) for prefix in prefixes)
        found["repeated"] = min(server.ask(prefix + prompt(8), 2, True) for prefix in prefixes)
        return found
    finally:
        server.close()


def markdown(report):
    runs = report["runs"]

    def median(who, dtype, row):
        return statistics.median(run["seconds"][row] for run in runs if (run["who"], run["dtype"]) == (who, dtype))

    def ratios(dtype, row):
        rounds = {}
        for run in runs:
            if run["dtype"] == dtype:
                rounds.setdefault(run["round"], {})[run["who"]] = run["seconds"][row]
        each = [found["llama"] / found["ours"] for found in rounds.values() if len(found) == 2]
        return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" if each else ""

    loads = " to ".join(f"{load:.1f}" for load in report["load"])
    machine = report["machine"]
    lines = [
        f"{report['date']}, {machine['processor']}, {machine['threads']} threads, load {loads}; "
        f"llama_cpp_python {machine['versions']['llama_cpp_python']}; `{report['command']}` at {report['commit']}",
        "",
        "| | this program | llama.cpp | times as fast, by rounds |",
        "|---|---|---|---|",
    ]
    present = {(run["who"], run["dtype"]) for run in runs}
    for dtype in [dtype for dtype in TYPES if any(kind == dtype for _, kind in present)]:
        for number in SEQUENCES:
            cells = [
                f"{number * ANSWER / median(who, dtype, str(number)):.0f} tokens/s" if (who, dtype) in present else ""
                for who in ["ours", "llama"]
            ]
            title = "1 request" if number == 1 else f"{number} requests"
            lines.append(f"| {title}, {dtype} | {' | '.join(cells)} | {ratios(dtype, str(number))} |")
        cells = [
            f"{median(who, dtype, 'first') * 1e3:.0f} ms" if (who, dtype) in present else "" for who in ["ours", "llama"]
        ]
        lines.append(f"| first token of {FIRST}, {dtype} | {' | '.join(cells)} | {ratios(dtype, 'first')} |")
        if ("ours", dtype) in present:
            [first, again] = [median("ours", dtype, row) for row in ["prefix", "repeated"]]
            lines.append(
                f"| a beginning of {PREFIX} tokens, {dtype} | {first * 1e3:.0f} ms, repeated {again * 1e3:.0f} ms | "
                f"| {first / again:.1f} |"
            )
            lines.append(f"| start to ready, {dtype} | {median('ours', dtype, 'start'):.2f} s | | |")
    return "\n".join(lines)


def main():
    asked = arguments()
    arena = prepared(asked)
    llama = Llama(arena, asked)
    loads = [os.getloadavg()[0]]
    if loads[0] > BUSY:
        say(f"the machine is not idle, or was not a minute ago: its load is {loads[0]:.1f}")
    for dtype in asked.types:
        if "llama" in asked.only:
            llama.choose(dtype)
        if "ours" in asked.only:
            # Programs are compiled once.
            Server(arena, asked, dtype).close()
    runs = []
    for number in range(asked.rounds):
        for dtype in asked.types:
            for who in asked.only if number % 2 == 0 else asked.only[::-1]:
                if who == "ours":
                    seconds = measured(arena, asked, dtype, number)
                else:
                    seconds = llama.round(dtype, number)
                rates = {row: round(value, 4) for row, value in seconds.items()}
                say(f"round {number + 1}, {dtype}, {who}: {rates}")
                runs.append({"round": number, "dtype": dtype, "who": who, "seconds": seconds})
    loads.append(os.getloadavg()[0])
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "bench/serving.sh " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "machine": table.machine(arena.python),
        "load": loads,
        "choices": llama.known,
        "runs": runs,
    }
    file = asked.json or asked.environment / "serving.json"
    file.write_text(json.dumps(report, indent=1))
    say(f"all figures: {file}")
    print(markdown(report))


if __name__ == "__main__":
    main()
