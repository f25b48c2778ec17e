"""The protocol between run.py and a contestant: a JSON object as argument, and one on each line of standard output."""

import json
import sys
import time


def read():
    return json.loads(sys.argv[1])


def tell(**event):
    print(json.dumps(event), flush=True)


def steps(job, step):
    """Runs the steps of a job and reports the loss and the seconds of each. `step` maps a step number to a loss."""
    for number in range(job["steps"]):
        start = time.perf_counter()
        loss = step(number)
        tell(step=number, loss=loss, seconds=time.perf_counter() - start)


def prefills(job, empty, read):
    """Reads a prompt several times and reports the seconds of each but the first, which compiles programs and touches
    memory. `empty` makes an empty cache, and `read` maps it to the first token.
    """
    for number in range(1 + job["steps"]):
        cache = empty()
        start = time.perf_counter()
        token = read(cache)
        seconds = time.perf_counter() - start
        if number > 0:
            tell(step=number, tokens=[token], seconds=seconds)
