"""Measures Orbax for bench/checkpoints.sh: checkpoints.py save|restore DIRECTORY LAYERS. A line says the seconds and the bytes."""

import sys
import time

import jax
import numpy
import orbax.checkpoint as ocp

DIMS, TREES = (2048, 8192), ("params", "mu", "nu")

task, directory, layers = sys.argv[1:]
LAYERS = int(layers)
size = len(TREES) * LAYERS * DIMS[0] * DIMS[1] * 4
options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
with ocp.CheckpointManager(directory, options=options) as manager:
    if task == "save":
        random = numpy.random.default_rng(0)
        array = lambda: jax.numpy.asarray(random.random(DIMS, numpy.float32) - 0.5)
        state = {tree: {f"layers_{layer}": {"kernel": array()} for layer in range(LAYERS)} for tree in TREES}
        start = time.perf_counter()
        manager.save(1, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
    else:
        leaf = jax.ShapeDtypeStruct(DIMS, numpy.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        wanted = {tree: {f"layers_{layer}": {"kernel": leaf} for layer in range(LAYERS)} for tree in TREES}
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        start = time.perf_counter()
        state = manager.restore(1, args=ocp.args.PyTreeRestore(wanted, restore_args=arguments))
        jax.block_until_ready(state)
    print(f"{time.perf_counter() - start:.3f} {size}")
