"""Writes trees of odd shapes and all element types in every layout of Orbax, by one process and by four.

Usage: trees.py DIRECTORY NUMBER_OF_TREES

Tree `N` in layout `L` is in `DIRECTORY/N/L`; `DIRECTORY/N/expected.json` holds its arrays.

Four processes are imitated: shards go to the databases `ocdbt.process_0` to `ocdbt.process_3` in turn, by TensorStore with
the metadata that Orbax gives it, and Orbax merges them.
"""

import asyncio
import itertools
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

jax.config.update("jax_enable_x64", True)

DTYPES = (
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 "
    "float64"
).split()
# Types that our host arrays lack: they are listed, not read.
UNKNOWN = "complex64 int2 float8_e4m3b11fnuz".split()


def random_array(generator, dtype, shape):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == bool:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu" or "int" in dtype.name:
        bits = 4 if dtype.name == "int4" else min(31, 8 * dtype.itemsize - 1)
        low = 0 if dtype.name.startswith("uint") else -(2 ** (bits - 1))
        return np.asarray(generator.integers(low, 2 ** (bits - 1), shape)).astype(dtype)
    return np.asarray(generator.standard_normal(shape)).astype(dtype)


def tree(number):
    """Shapes with primes, ones and no axes, some large enough for data files."""
    generator = np.random.default_rng(number)
    sizes = [1, 2, 3, 5, 7, 11, 13, 17, 24, 31]
    arrays = {}
    for place, dtype in enumerate(DTYPES):
        rank = (place + number) % 5
        shape = tuple(int(generator.choice(sizes[: 10 - rank])) for _ in range(rank))
        arrays[dtype] = random_array(generator, dtype, shape)
    return {
        "params": {"params": arrays, "deep": [{"scale": random_array(generator, "float32", (37, 19 + number))}]},
        "opt_state": [{"count": random_array(generator, "int32", ())}, None, {}],
        "step": np.asarray(number, np.int32),
    }


def described(array):
    array = np.asarray(array)
    contents = array.astype(np.int8) if array.dtype.name == "int4" else array
    contents = np.ascontiguousarray(contents).tobytes().hex()
    return {"dtype": array.dtype.name, "dims": list(array.shape), "contents": contents}


def named_leaves(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: ".".join(str(key.key if hasattr(key, "key") else key.idx) for key in path)
    return {name(path): leaf for path, leaf in leaves}


def placed(number, mesh, array):
    """On four devices, sharded over axes that can be divided, or replicated, or on the host."""
    if number % 3 == 0 or not array.ndim:
        return array
    axes = ["a", "b"] if number % 2 else ["b", "a"]
    spec = []
    for dim in array.shape:
        spec.append(axes.pop() if axes and dim % 2 == 0 else None)
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def metadata_of(zarr3, array, chunk):
    """TensorStore's array metadata as Orbax writes it."""
    if not zarr3:
        compressor = {"id": "zstd", "level": 1}
        return {"shape": array.shape, "chunks": chunk, "compressor": compressor, "dimension_separator": "."}
    codecs = [{"name": "zstd", "configuration": {"level": 3}}]
    if array.dtype.itemsize > 1:
        codecs.insert(0, {"name": "bytes", "configuration": {"endian": "little"}})
    sharding = {"chunk_shape": chunk, "codecs": codecs}
    return {
        "shape": array.shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


async def write_by_four(directory, leaves, zarr3, grow):
    """`grow` makes shards that are larger than the array; otherwise they are smaller."""
    for name, array in leaves.items():
        array = np.asarray(array)
        chunk = [dim + 3 if grow else max(1, dim // 2) for dim in array.shape]
        starts = itertools.product(*(range(0, dim, size) for dim, size in zip(array.shape, chunk)))
        boxes = [tuple(slice(at, at + size) for at, size in zip(start, chunk)) for start in starts]
        stores = []
        for process in range(4):
            spec = {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": {
                    "driver": "ocdbt",
                    "base": f"file://{directory}/ocdbt.process_{process}/",
                    "path": f"{name}/",
                    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
                },
                "dtype": array.dtype.name,
                "metadata": metadata_of(zarr3, array, chunk),
                "store_data_equal_to_fill_value": True,
            }
            stores.append(await ts.open(spec, create=True, open=True))
        for index, box in enumerate(boxes):
            box = tuple(slice(part.start, min(part.stop, dim)) for part, dim in zip(box, array.shape))
            await stores[index % 4][box].write(array[box])
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    await ocdbt_utils.merge_ocdbt_per_process_files(epath.Path(directory), context, use_zarr3=zarr3)


def save_by_four(directory, tree, zarr3, grow):
    # Orbax writes the tree's description; the arrays are written again.
    ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=zarr3).save(directory, tree)
    for entry in epath.Path(directory).iterdir():
        if entry.name in ("d", "manifest.ocdbt") or entry.name.startswith("ocdbt."):
            entry.rmtree() if entry.is_dir() else entry.unlink()
    asyncio.run(write_by_four(directory, named_leaves(tree), zarr3, grow))


def write(directory, number, layouts=None):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    arrays = tree(number)
    os.makedirs(directory)
    with open(f"{directory}/expected.json", "w") as file:
        json.dump({name: described(array) for name, array in named_leaves(arrays).items()}, file)
    on_devices = jax.tree.map(lambda array: placed(number, mesh, array), arrays)
    with_unknown = {**on_devices, "unknown": {name: jnp.zeros((3,), name) for name in UNKNOWN}}
    savers = {
        f"{'zarr3' if zarr3 else 'zarr2'}_{'ocdbt' if ocdbt else 'plain'}": lambda path, zarr3=zarr3, ocdbt=ocdbt: (
            ocp.PyTreeCheckpointer(use_ocdbt=ocdbt, use_zarr3=zarr3).save(path, with_unknown)
        )
        for zarr3 in (True, False)
        for ocdbt in (True, False)
    }
    savers["save_pytree"] = lambda path: v1.save_pytree(path, with_unknown)
    for zarr3 in (True, False):
        for grow in (True, False):
            name = f"{'zarr3' if zarr3 else 'zarr2'}_four_{'larger' if grow else 'smaller'}"
            savers[name] = lambda path, zarr3=zarr3, grow=grow: save_by_four(path, arrays, zarr3, grow)
    for name, save in savers.items():
        if layouts is None or name in layouts:
            save(f"{directory}/{name}")
    return len(savers)


def main():
    directory, count = sys.argv[1], int(sys.argv[2])
    for number in range(count):
        layouts = write(f"{directory}/{number}", number)
    print(f"{count} trees in {layouts} layouts by Orbax {ocp.__version__}")


if __name__ == "__main__":
    main()
