"""The model in JAX, with the settings of a tuned program. `jax_train.py` and `jax_decode.py` run it."""

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

import model

F32 = jnp.float32


def keep_programs(directory):
    """Caches compiled programs in a directory, if one is given."""
    if directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def layer_names():
    return {name: name.split(".")[-1] for name in model.LAYER}


def initial(key):
    """Random parameters in float32. Matrices are `[inputs, outputs]`, and layers are a list."""

    def parameter(number, name, shape):
        if len(shape) == 1:
            return jnp.ones(shape, F32)
        shape = shape if name == "model.embed_tokens.weight" else shape[::-1]
        return 0.02 * jax.random.normal(jax.random.fold_in(key, number), shape, F32)

    numbered = enumerate(model.parameters())
    return arranged({name: parameter(number, name, shape) for number, (name, shape) in numbered})


def published(path):
    """The parameters in a published model's file."""

    def parameter(name, array):
        matrix = array.ndim == 2 and name != "model.embed_tokens.weight"
        return np.ascontiguousarray(array.T) if matrix else array

    return arranged({name: parameter(name, array) for name, array in load_file(path).items()})


def arranged(flat):
    layers = [
        {short: flat[f"model.layers.{index}.{name}.weight"] for name, short in layer_names().items()}
        for index in range(model.LAYERS)
    ]
    return {
        "embedding": flat["model.embed_tokens.weight"],
        "layers": layers,
        "norm": flat["model.norm.weight"],
        "head": flat["lm_head.weight"],
    }


def stacked(parameters):
    """Stacks the parameters of the layers for a scan."""
    layers = jax.tree.map(lambda *arrays: jnp.stack(arrays), *parameters["layers"])
    return {**parameters, "layers": layers}


def rms_norm(x, scale):
    wide = x.astype(F32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + model.EPSILON)
    return (wide * scale).astype(x.dtype)


def rotate(x, positions):
    """Rotary embedding of `[..., position, head, head_dim]`."""
    exponents = jnp.arange(model.HEAD_DIM // 2, dtype=F32) / (model.HEAD_DIM // 2)
    angles = positions[..., None].astype(F32) * model.ROPE_BASE**-exponents
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]
    left, right = jnp.split(x.astype(F32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def narrow_linear(x, weight):
    return jnp.dot(x, weight.astype(x.dtype))


def wide_linear(x, weight):
    """A product that is computed in float32 and then rounded, which is faster on CPUs."""
    return jnp.dot(x, weight.astype(x.dtype), preferred_element_type=F32).astype(x.dtype)


@jax.custom_vjp
def wide_both_linear(x, weight):
    """`wide_linear` whose gradients are computed in the same way."""
    return wide_linear(x, weight)


def wide_both_forward(x, weight):
    weight = weight.astype(x.dtype)
    return wide_linear(x, weight), (x, weight)


def wide_both_backward(kept, cotangent):
    x, weight = kept
    dx = jnp.dot(cotangent, weight.T, preferred_element_type=F32).astype(x.dtype)
    rows, cotangents = (array.reshape(-1, array.shape[-1]) for array in (x, cotangent))
    return dx, jnp.dot(rows.T, cotangents, preferred_element_type=F32)


wide_both_linear.defvjp(wide_both_forward, wide_both_backward)

LINEAR = {"narrow": narrow_linear, "wide": wide_linear, "wide both ways": wide_both_linear}


def manual_attention(query, key, value, products):
    preferred = None if products == "narrow" else F32
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=preferred).astype(F32)
    mask = jnp.tri(query.shape[1], key.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(mask, scores * model.HEAD_DIM**-0.5, -1e30), axis=-1)
    context = jnp.einsum("bhts,bshd->bthd", weights.astype(value.dtype), value, preferred_element_type=preferred)
    return context.astype(value.dtype)


def library_attention(query, key, value, products):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


ATTENTION = {"manual": manual_attention, "library": library_attention}


def layer(x, weights, positions, variant):
    linear = LINEAR[variant["products"]]
    heads = (*x.shape[:-1], model.HEADS, model.HEAD_DIM)
    hidden = rms_norm(x, weights["input_layernorm"])
    query = rotate(linear(hidden, weights["q_proj"]).reshape(heads), positions)
    key = rotate(linear(hidden, weights["k_proj"]).reshape(heads), positions)
    value = linear(hidden, weights["v_proj"]).reshape(heads)
    context = ATTENTION[variant["attention"]](query, key, value, variant["products"])
    x = x + linear(context.reshape(x.shape), weights["o_proj"])
    hidden = rms_norm(x, weights["post_attention_layernorm"])
    gate = jax.nn.silu(linear(hidden, weights["gate_proj"]))
    return x + linear(gate * linear(hidden, weights["up_proj"]), weights["down_proj"])


REMAT = {
    "none": lambda function: function,
    "products": lambda function: jax.checkpoint(
        function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}


def loss(parameters, rows, variant, dtype):
    """The mean cross-entropy of rows, which are one token longer than a sequence."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    positions = jnp.arange(inputs.shape[1])
    x = jnp.take(parameters["embedding"], inputs, axis=0).astype(dtype)
    apply = REMAT[variant["remat"]](lambda x, weights: layer(x, weights, positions, variant))
    if variant["layers"] == "scanned":
        x, _ = jax.lax.scan(lambda x, weights: (apply(x, weights), None), x, parameters["layers"])
    else:
        for weights in parameters["layers"]:
            x = apply(x, weights)
    logits = LINEAR[variant["products"]](rms_norm(x, parameters["norm"]), parameters["head"]).astype(F32)
    of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_targets)
