"""Measures how long JAX takes to trace, differentiate and lower a training step of a transformer like Llama 3.1 405B.

Usage: trace_jax.py [RUNS]. Needs jax and optax. Weights and batch are abstract arrays, sharded over 128 CPU devices.
Layers are those of Llama, each rematerialized, once scanned and once unrolled. The optimizer is AdamW after clipping.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=128"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 126, 16384, 128, 8, 128
MLP, VOCAB, ROWS, LENGTH = 53248, 128256, 128, 8192

LAYER = {
    "pre_attention_norm": (WIDTH,),
    "query": (WIDTH, HEADS, HEAD_DIM),
    "key": (WIDTH, KV_HEADS, HEAD_DIM),
    "value": (WIDTH, KV_HEADS, HEAD_DIM),
    "out": (HEADS, HEAD_DIM, WIDTH),
    "pre_mlp_norm": (WIDTH,),
    "wi_0": (WIDTH, MLP),
    "wi_1": (WIDTH, MLP),
    "wo": (MLP, WIDTH),
}


def constrained(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("fsdp")))


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype)


def rotate(x, angles):
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles)[:, :, None, :], jnp.cos(angles)[:, :, None, :]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def attention(x, weights, angles, mask):
    query = constrained(rotate(jnp.einsum("bte,ehd->bthd", x, weights["query"]), angles))
    key = constrained(rotate(jnp.einsum("bte,ehd->bthd", x, weights["key"]), angles))
    value = constrained(jnp.einsum("bte,ehd->bthd", x, weights["value"]))
    query = query.reshape(*query.shape[:2], KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jnp.einsum("bthgd,bshd->bhgts", query, key).astype(jnp.float32) * HEAD_DIM**-0.5
    weighted = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(x.dtype)
    context = jnp.einsum("bhgts,bshd->bthgd", weighted, value)
    context = constrained(context.reshape(*context.shape[:2], HEADS, HEAD_DIM))
    return constrained(jnp.einsum("bthd,hde->bte", context, weights["out"]))


def layer(x, weights, angles, mask):
    weights = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
    x = constrained(x + attention(rms_norm(x, weights["pre_attention_norm"]), weights, angles, mask))
    hidden = rms_norm(x, weights["pre_mlp_norm"])
    gate = constrained(jnp.einsum("bte,em->btm", hidden, weights["wi_0"]))
    up = constrained(jnp.einsum("bte,em->btm", hidden, weights["wi_1"]))
    return constrained(x + jnp.einsum("btm,me->bte", jax.nn.silu(gate) * up, weights["wo"]))


def loss(parameters, batch, scan):
    x = jnp.take(parameters["embedding"].astype(jnp.bfloat16), batch["inputs"], axis=0)
    frequencies = 500000.0 ** (-jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = batch["positions"][..., None] * frequencies
    segments = batch["segments"]
    mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(LENGTH, dtype=bool)
    mask = mask[:, None, None]
    recomputed = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    if scan:
        x, _ = jax.lax.scan(lambda x, w: (recomputed(x, w, angles, mask), None), x, parameters["layers"])
    else:
        for weights in parameters["layers"]:
            x = recomputed(x, weights, angles, mask)
    x = rms_norm(x, parameters["norm"])
    logits = jnp.einsum("bte,ev->btv", x, parameters["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    counts = (segments != 0).astype(jnp.float32)
    return jnp.sum(losses * counts) / jnp.sum(counts)


def abstract(tree, dtype, spec):
    placed = NamedSharding(MESH, spec)
    leaf = lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
    return jax.tree.map(leaf, tree, is_leaf=lambda node: isinstance(node, tuple))


def measure(scan):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-5))
    layers = {name: (LAYERS, *shape) for name, shape in LAYER.items()} if scan else [LAYER] * LAYERS
    split = P(None, "fsdp") if scan else P("fsdp")
    parameters = {
        "embedding": abstract((VOCAB, WIDTH), jnp.float32, P(None, "fsdp")),
        "layers": abstract(layers, jnp.float32, split),
        "norm": abstract((WIDTH,), jnp.float32, P("fsdp")),
        "head": abstract((WIDTH, VOCAB), jnp.float32, P("fsdp")),
    }
    names = ["inputs", "targets", "positions", "segments"]
    batch = {name: abstract((ROWS, LENGTH), jnp.int32, P("fsdp")) for name in names}
    state = jax.eval_shape(optimizer.init, parameters)

    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch, scan)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(parameters, state, batch)
    middle = time.perf_counter()
    lowered = traced.lower()
    lower = time.perf_counter()
    text = lowered.as_text()
    end = time.perf_counter()
    name = "scanned" if scan else "unrolled"
    print(
        f"jax {name}: {end - start:.3f} s (trace {middle - start:.3f}, lower {lower - middle:.3f}, "
        f"print {end - lower:.3f}), {len(text)} bytes of text",
        flush=True,
    )


MESH = Mesh(jax.devices(), ("fsdp",))
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    measure(True)
    measure(False)
