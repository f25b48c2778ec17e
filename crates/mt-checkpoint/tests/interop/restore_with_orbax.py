"""Restores a checkpoint with Orbax, as MaxText does and without any hints, and compares every array.

Usage: restore_with_orbax.py CHECKPOINTS_DIRECTORY EXPECTED_JSON ocdbt|plain zarr3|zarr2
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

# 64-bit integers and floats must not be narrowed on their way through `jax.Array`.
jax.config.update("jax_enable_x64", True)

STEP = 1234
# Holds `KERNEL` alone, and no JSON.
STEP_OF_ARRAYS = 7
KERNEL = "params.params.decoder.kernel"


def describe(value):
    array = np.asarray(value)
    # The upper half of a byte that holds an `int4` may be anything, so the sign is extended into it.
    contents = array.astype(np.int8) if array.dtype.name == "int4" else array
    return {
        "dtype": array.dtype.name,
        "dims": list(array.shape),
        "contents": np.ascontiguousarray(contents).tobytes().hex(),
    }


def flatten(tree):
    """Leaves by dotted name; empty containers and None are leaves too."""
    if isinstance(tree, dict) and tree:
        items = tree.items()
    elif isinstance(tree, (list, tuple)) and tree:
        items = enumerate(tree)
    else:
        return {"": tree}
    leaves = {}
    for key, value in items:
        for name, leaf in flatten(value).items():
            leaves[f"{key}.{name}" if name else str(key)] = leaf
    return leaves


def compare(how, tree, expected):
    leaves = flatten(tree)
    empties = {f"opt_state.{index}": leaves.pop(f"opt_state.{index}") for index in (1, 2, 3, 4)}
    kinds = [type(value) for value in empties.values()]
    assert kinds == [type(None), dict, list, tuple], (how, empties)
    assert set(leaves) == set(expected), (how, set(leaves) ^ set(expected))
    for name, leaf in leaves.items():
        found = describe(leaf)
        if found != expected[name]:
            found["contents"] = found["contents"][:64]
            raise AssertionError(f"{how}: {name}: found {found}")
    print(f"{how}: {len(leaves)} arrays agree")


def main():
    directory, expected_file, container, version = sys.argv[1:]
    use_ocdbt, use_zarr3 = container == "ocdbt", version == "zarr3"
    with open(expected_file) as file:
        expected = json.load(file)

    def open_manager():
        return ocp.CheckpointManager(
            directory,
            item_names=("items",),
            item_handlers={"items": ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)},
        )

    manager = open_manager()
    assert manager.all_steps() == [STEP_OF_ARRAYS, STEP], manager.all_steps()
    assert manager.latest_step() == STEP
    assert manager.metadata(STEP).custom_metadata["scan_layers"] is True

    restored = manager.restore(STEP, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))
    compare("CheckpointManager, no hints", restored["items"], expected)

    for how, other in (("handlers given", open_manager()), ("nothing given", ocp.CheckpointManager(directory))):
        for args in ({}, {"args": ocp.args.Composite(items=ocp.args.PyTreeRestore())}):
            restored = other.restore(STEP_OF_ARRAYS, **args)
            assert list(restored.keys()) == ["items"], restored
            leaves = {name: describe(leaf) for name, leaf in flatten(restored["items"]).items()}
            assert leaves == {KERNEL: expected[KERNEL]}, leaves
            print(f"CheckpointManager, {how}, {'items' if args else 'no item'} asked for: agrees")

    # As MaxText restores: shapes and shardings given, on a mesh that the writer did not have.
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 1), ("fsdp", "tensor"))
    metadata = manager.item_metadata(STEP)["items"].tree

    def abstract(leaf):
        rows = leaf.shape and leaf.shape[0] % 4 == 0
        spec = jax.sharding.PartitionSpec("fsdp") if rows else jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    target = jax.tree.map(abstract, metadata, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    restored = manager.restore(
        STEP,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeRestore(
                item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
            )
        ),
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored["items"]))
    compare("CheckpointManager, sharded jax.Array", restored["items"], expected)

    # Parameters only, as for `load_parameters_path`.
    weights = {"params": target["params"]}
    path = os.path.join(directory, str(STEP), "items")
    restored = ocp.PyTreeCheckpointer().restore(
        path,
        args=ocp.args.PyTreeRestore(
            item=weights,
            restore_args=ocp.checkpoint_utils.construct_restore_args(weights),
            partial_restore=True,
        ),
    )
    for name, leaf in flatten(restored).items():
        assert describe(leaf) == expected[name], name
    print(f"PyTreeCheckpointer, parameters only: {len(flatten(restored))} arrays agree")

    restored = ocp.PyTreeCheckpointer().restore(path)
    compare("PyTreeCheckpointer, no hints", restored, expected)

    for name in expected:
        if use_ocdbt:
            kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
        else:
            kvstore = {"driver": "file", "path": os.path.join(path, name)}
        driver = "zarr3" if use_zarr3 else "zarr"
        array = ts.open({"driver": driver, "kvstore": kvstore}).result().read().result()
        assert describe(array) == expected[name], name
    print(f"tensorstore: {len(expected)} arrays agree")
    if use_ocdbt:
        # The item beside the state is a database of its own.
        kvstore = {"driver": "ocdbt", "base": f"file://{path}/exact/", "path": f"{KERNEL}/"}
        driver = "zarr3" if use_zarr3 else "zarr"
        assert ts.open({"driver": driver, "kvstore": kvstore}).result().dtype.name == "int32"
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
        dump = ts.ocdbt.dump(ts.KvStore.open(f"file://{path}/").result()).result()
        statistics = dump["versions"][-1]["root"]["statistics"]
        keys = store.list().result()
        assert statistics["num_keys"] == len(keys), (statistics, len(keys))
        print(f"tensorstore: {len(keys)} keys")


main()
