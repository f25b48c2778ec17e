"""Writes the same state with Orbax in each layout, and what it consists of.

Usage: write_with_orbax.py DIRECTORY
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEP = 40
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)

jax.config.update("jax_enable_x64", True)


def state(place):
    def counting(dtype, shape):
        return jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)

    params = {dtype: counting(dtype, (3, 5)) for dtype in DTYPES}
    params["sharded"] = place(counting("float32", (64, 32)))
    params["sharded_half"] = place(counting("bfloat16", (8, 6)))
    params["zeros"] = place(jnp.zeros((16, 4), jnp.float32))
    moments = {"scale": counting("float32", (7,))}
    return {
        "params": {"params": params},
        "opt_state": [
            {"count": jnp.int32(40), "mu": moments, "nu": moments},
            None,
            {},
            [],
            (),
            {"host": np.arange(6, dtype=np.float32).reshape(2, 3)},
        ],
        "step": jnp.int32(40),
        "note": "a string",
    }


def describe(tree):
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, str):
            continue
        name = ".".join(str(key.key if hasattr(key, "key") else key.idx) for key in path)
        array = np.asarray(leaf)
        leaves[name] = {
            "dtype": array.dtype.name,
            "dims": list(array.shape),
            "contents": np.ascontiguousarray(array).tobytes().hex(),
        }
    return leaves


def main():
    (directory,) = sys.argv[1:]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    split = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    replicate = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
    with open(os.path.join(directory, "expected.json"), "w") as file:
        json.dump(describe(state(split)), file)
    kinds = {
        "zarr3": (split, False, True),
        "zarr2": (split, False, False),
        "replicated": (replicate, False, True),
        "ocdbt": (split, True, True),
        "ocdbt_zarr2": (split, True, False),
    }
    for kind, (place, use_ocdbt, use_zarr3) in kinds.items():
        manager = ocp.CheckpointManager(
            os.path.join(directory, kind, "checkpoints"),
            item_names=("items",),
            item_handlers={"items": ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)},
            options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
        )
        tree = state(place)
        manager.save(
            STEP,
            args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)),
            custom_metadata={"scan_layers": False},
        )
        manager.close()
        print(f"{kind}: {len(describe(tree))} arrays written by Orbax {ocp.__version__}")


main()
