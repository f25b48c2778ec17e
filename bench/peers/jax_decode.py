"""Continues a prompt with JAX by greedy decoding with a KV cache, or only reads one. Usage: jax_decode.py JOB, see job.py."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import job
import jax_model
import model

F32 = jnp.float32
asked = job.read()
jax_model.keep_programs(asked["cache"])
variant, dtype = asked["variant"], jnp.dtype(asked["dtype"])
PREFILL = asked["row"] == "prefill"
# The length of the cache.
LENGTH = model.LENGTH if PREFILL else model.PROMPT + model.GENERATED
WIDE = None if variant["products"] == "narrow" else F32


def linear(x, weight):
    outputs_first = variant["weights"] == "outputs first"
    if variant["products"] == "sums" and len(x) == 1:
        # For one token, the compiler's loops may be faster than its matrix product.
        x, wide, axis = x[0].astype(F32), weight.astype(F32), 1 if outputs_first else 0
        return jnp.sum((x if outputs_first else x[:, None]) * wide, axis=axis)[None].astype(weight.dtype)
    return jnp.dot(x, weight.T if outputs_first else weight, preferred_element_type=WIDE).astype(x.dtype)


def layer(x, weights, cache, start):
    """Applies a layer to the positions from `start` on, `[position, embed]`. Returns its output and the new cache."""
    positions = start + jnp.arange(x.shape[0])
    heads = (x.shape[0], model.HEADS, model.HEAD_DIM)
    hidden = jax_model.rms_norm(x, weights["input_layernorm"])
    query = jax_model.rotate(linear(hidden, weights["q_proj"]).reshape(heads), positions)
    key = jax_model.rotate(linear(hidden, weights["k_proj"]).reshape(heads), positions)
    value = linear(hidden, weights["v_proj"]).reshape(heads)
    # The cache is stored by head, in the order in which attention reads it.
    keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], key.swapaxes(0, 1), start, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(cache["values"], value.swapaxes(0, 1), start, axis=1)
    scores = jnp.einsum("thd,hsd->hts", query, keys, preferred_element_type=WIDE).astype(F32) * model.HEAD_DIM**-0.5
    mask = positions[:, None] >= jnp.arange(LENGTH)[None, :]
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(x.dtype)
    context = jnp.einsum("hts,hsd->thd", scores, values, preferred_element_type=WIDE).astype(x.dtype)
    x = x + linear(context.reshape(x.shape), weights["o_proj"])
    hidden = jax_model.rms_norm(x, weights["post_attention_layernorm"])
    gate = jax.nn.silu(linear(hidden, weights["gate_proj"]))
    x = x + linear(gate * linear(hidden, weights["up_proj"]), weights["down_proj"])
    return x, {"keys": keys, "values": values}


def advance(parameters, cache, tokens, start):
    """The most probable next token, and the cache with the given tokens."""
    x = jnp.take(parameters["embedding"], tokens, axis=0)
    if variant["layers"] == "scanned":
        x, cache = jax.lax.scan(lambda x, both: layer(x, *both, start), x, (parameters["layers"], cache))
    else:
        pairs = [pair for pair in zip(parameters["layers"], cache)]
        cache = []
        for weights, before in pairs:
            x, after = layer(x, weights, before, start)
            cache.append(after)
    logits = linear(jax_model.rms_norm(x[-1:], parameters["norm"]), parameters["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@functools.partial(jax.jit, donate_argnums=1)
def one(parameters, cache, tokens, start):
    return advance(parameters, cache, tokens, start)


@functools.partial(jax.jit, donate_argnums=1)
def all_of_them(parameters, cache, token):
    def body(carry, start):
        token, cache = carry
        token, cache = advance(parameters, cache, token, start)
        return (token, cache), token[0]

    starts = jnp.arange(model.PROMPT, LENGTH - 1)
    (_, cache), tokens = jax.lax.scan(body, (token, cache), starts)
    return tokens, cache


@jax.jit
def empty_cache():
    shape = (model.HEADS, LENGTH, model.HEAD_DIM)
    if variant["layers"] == "scanned":
        return {name: jnp.zeros((model.LAYERS, *shape), dtype) for name in ("keys", "values")}
    return [{name: jnp.zeros(shape, dtype) for name in ("keys", "values")} for _ in range(model.LAYERS)]


@functools.partial(jax.jit, donate_argnums=0)
def prepare(parameters):
    """The parameters in the type and the layout of the computation."""
    parameters = jax.tree.map(lambda array: array.astype(dtype), parameters)
    if variant["weights"] == "outputs first":
        turned = lambda name, array: array if array.ndim == 1 else array.T
        layers = [{name: turned(name, array) for name, array in one.items()} for one in parameters["layers"]]
        parameters = {**parameters, "layers": layers, "head": parameters["head"].T}
    return jax_model.stacked(parameters) if variant["layers"] == "scanned" else parameters


def generate(parameters, prompt):
    token, cache = one(parameters, empty_cache(), prompt, 0)
    tokens = [int(token[0])]
    start = time.perf_counter()
    if variant["loop"] == "on the device":
        rest, _ = all_of_them(parameters, cache, token)
        tokens += np.asarray(rest).tolist()
    else:
        for position in range(model.PROMPT, LENGTH - 1):
            token, cache = one(parameters, cache, token, position)
            tokens.append(int(token[0]))
    return tokens, (time.perf_counter() - start) / (model.GENERATED - 1)


def main():
    parameters = prepare(jax_model.published(asked["weights"]))
    row = np.load(asked["tokens"])[0]
    if PREFILL:
        empty = lambda: jax.block_until_ready(empty_cache())
        job.prefills(asked, empty, lambda cache: int(one(parameters, cache, row[: model.LENGTH], 0)[0][0]))
        return
    for number in range(asked["steps"]):
        tokens, seconds = generate(parameters, row[: model.PROMPT])
        job.tell(step=number, tokens=tokens, seconds=seconds)


main()
