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
