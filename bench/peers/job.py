"""How the harness and a contestant's process talk: one JSON object as argument, one on each line of standard output."""

import json
import sys
import time


def read():
    return json.loads(sys.argv[1])


def tell(**event):
    print(json.dumps(event), flush=True)


def steps(job, step):
    """Runs the steps of a job and tells loss and seconds of each; `step` takes a number and returns the loss as a float."""
    for number in range(job["steps"]):
        start = time.perf_counter()
        loss = step(number)
        tell(step=number, loss=loss, seconds=time.perf_counter() - start)
