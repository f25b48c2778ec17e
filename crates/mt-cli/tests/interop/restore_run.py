"""Restores the newest step of a run with Orbax, as MaxText does, and prints every array as JSON.

Usage: restore_run.py CHECKPOINTS_DIRECTORY
"""

import json
import sys

import numpy as np
import orbax.checkpoint as ocp


def leaves(tree, path=()):
    """Arrays by dotted name."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return {} if tree is None else {".".join(path): np.asarray(tree)}
    return {name: leaf for key, value in items for name, leaf in leaves(value, (*path, str(key))).items()}


manager = ocp.CheckpointManager(sys.argv[1], item_names=("items", "iter"))
state = manager.restore(manager.latest_step(), args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))
print(
    json.dumps(
        {
            name: {
                "dtype": array.dtype.name,
                "dims": list(array.shape),
                "contents": np.ascontiguousarray(array).tobytes().hex(),
            }
            for name, array in leaves(state["items"]).items()
        }
    )
)
