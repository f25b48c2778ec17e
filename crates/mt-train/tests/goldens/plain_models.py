"""Tiny models in plain JAX, in f64, with weights in the form that MaxText's checkpoints store.

Layers multiply by the stored weights: query kernels include attention's scale, Gemma's embedding tables include the
root of the width, Gemma's norms multiply by `w` and GPT-3's by `1 + w`. Therefore no code here scales a gradient or a
weight explicitly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

VOCABULARY, WIDTH, HEADS, HEAD, WITHIN, LAYERS = 24, 12, 2, 6, 16, 2
ROWS, LENGTH = 4, 10
WINDOW, SOFT_CAP, NORM_EPSILON = 3, 2.5, 1e-6
# Constants of the schedule, of clipping, and of the optimizers. The epsilons are of the gradients' magnitude.
PEAK, FINAL_FRACTION, WARMUP, SCHEDULE, CLIP = 0.02, 0.1, 2, 8, 0.7
ADAM = dict(b1=0.9, b2=0.95, eps=1e-3, eps_root=1e-6)
DECAY = 0.3

random = np.random.default_rng(17)
tokens = random.integers(0, VOCABULARY, (ROWS, LENGTH))
targets = random.integers(0, VOCABULARY, (ROWS, LENGTH))
documents = [[10], [4, 6], [3, 5], [7]]
pad = lambda row: (row + [0] * LENGTH)[:LENGTH]
segments = np.array([pad([i + 1 for i, size in enumerate(row) for _ in range(size)]) for row in documents])
positions = np.array([pad([place for size in row for place in range(size)]) for row in documents])

ones = lambda x: jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + NORM_EPSILON)
rms = lambda x, scale: x / ones(x) * scale


def layer_norm(x, weights, name):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x / ones(x) * (1 + weights[f"{name}.scale"]) + weights[f"{name}.bias"]


def rotated(x, max_timescale, factor=1.0, dims=HEAD):
    """x: [rows, positions, heads, width of a head]."""
    timescale = max_timescale ** (2 * jnp.arange(dims // 2) / dims) * factor
    angle = (positions[..., None] / timescale)[:, :, None, :]
    one, other = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def attended(query, key, value, window=None, cap=None, sinks=None):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, HEADS // key.shape[2], 2))
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    place = np.arange(LENGTH)
    seen = (segments[:, :, None] == segments[:, None, :]) & (place[:, None] >= place)
    if window:
        seen &= place[:, None] - place < window
    scores = jnp.where(seen[:, None], scores, -1e30)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], scores.shape[:-1] + (1,))], -1)
    weights = jax.nn.softmax(scores, -1)[..., :LENGTH]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(value, HEADS // value.shape[2], 2))


def projected(x, weights, name):
    bias = weights.get(f"attention.{name}.bias", 0)
    return jnp.einsum("bte,ehd->bthd", x, weights[f"attention.{name}.kernel"]) + bias


out = lambda x, weights: jnp.einsum("bthd,hde->bte", x, weights["attention.out.kernel"])


def gated(x, weights, activation):
    hidden = activation(x @ weights["mlp.wi_0.kernel"]) * (x @ weights["mlp.wi_1.kernel"])
    return hidden @ weights["mlp.wo.kernel"]


def llama2(x, weights, layer):
    normed = rms(x, weights["pre_attention_norm.scale"])
    query, key, value = (projected(normed, weights, name) for name in ("query", "key", "value"))
    x += out(attended(rotated(query, 1e4), rotated(key, 1e4), value), weights)
    return x + gated(rms(x, weights["pre_mlp_norm.scale"]), weights, jax.nn.silu)


gelu = lambda x: jax.nn.gelu(x, approximate=True)


def around(x, weights, attention):
    x += rms(attention(rms(x, weights["pre_attention_norm.scale"])), weights["post_attention_norm.scale"])
    hidden = gated(rms(x, weights["pre_mlp_norm.scale"]), weights, gelu)
    return x + rms(hidden, weights["post_mlp_norm.scale"])


def gemma2(x, weights, layer):
    def attention(x):
        query, key, value = (projected(x, weights, name) for name in ("query", "key", "value"))
        window = WINDOW if layer == 0 else None
        return out(attended(rotated(query, 1e4), rotated(key, 1e4), value, window, SOFT_CAP), weights)

    return around(x, weights, attention)


GEMMA3_SCALAR = 5.0


def gemma3(x, weights, layer):
    def attention(x):
        query, key, value = (projected(x, weights, name) for name in ("query", "key", "value"))
        query = rms(query, weights["attention.query_norm.scale"])
        key = rms(key, weights["attention.key_norm.scale"])
        window, rope = (WINDOW, (1e4, 1.0)) if layer == 0 else (None, (1e6, 8.0))
        query = rotated(query, *rope) * GEMMA3_SCALAR**-0.5
        return out(attended(query, rotated(key, *rope), value, window), weights)

    return around(x, weights, attention)


def gpt3(x, weights, layer):
    normed = layer_norm(x, weights, "pre_attention_norm")
    query, key, value = (projected(normed, weights, name) for name in ("query", "key", "value"))
    x += out(attended(query * HEAD**-0.5, key, value), weights) + weights["attention.out.bias"]
    normed = layer_norm(x, weights, "pre_mlp_norm")
    hidden = gelu(normed @ weights["mlp.wi_0.kernel"] + weights["mlp.wi_0.bias"])
    return x + hidden @ weights["mlp.wo.kernel"] + weights["mlp.wo.bias"]


def chosen(scores, weights_of, count):
    """The weights of the experts of each token: of the `count` best scores, and zero for others. [rows, positions, experts]."""
    _, indices = jax.lax.top_k(scores, count)
    mask = jnp.sum(jax.nn.one_hot(indices, scores.shape[-1]), -2)
    return weights_of(mask)


def softmax_of_chosen(logits, count):
    return chosen(logits, lambda mask: jax.nn.softmax(jnp.where(mask > 0, logits, -1e30), -1), count)


def mixed(x, weights, shares, activation=jax.nn.silu):
    gate, up = (jnp.einsum("bte,xef->btxf", x, weights[f"experts.{name}"]) for name in ("wi_0", "wi_1"))
    made = jnp.einsum("btxf,xfe->btxe", activation(gate) * up, weights["experts.wo"])
    return jnp.einsum("btx,btxe->bte", shares, made)


def mixtral(x, weights, layer):
    normed = rms(x, weights["pre_attention_norm.scale"])
    query, key, value = (projected(normed, weights, name) for name in ("query", "key", "value"))
    x += out(attended(rotated(query, 1e6), rotated(key, 1e6), value), weights)
    normed = rms(x, weights["pre_mlp_norm.scale"])
    return x + mixed(normed, weights, softmax_of_chosen(normed @ weights["router.kernel"], CHOSEN))


def gpt_oss(x, weights, layer):
    """Learned sinks beside the scores, windows in every other layer, and clamped experts with biases."""
    normed = rms(x, weights["pre_attention_norm.scale"])
    query, key, value = (projected(normed, weights, name) for name in ("query", "key", "value"))
    window = WINDOW if layer == 0 else None
    mixed_values = attended(
        rotated(query, 1.5e5) * HEAD**-0.5, rotated(key, 1.5e5), value, window, sinks=weights["attention.sinks"]
    )
    x += out(mixed_values, weights) + weights["attention.out.bias"]
    normed = rms(x, weights["pre_mlp_norm.scale"])
    shares = softmax_of_chosen(normed @ weights["router.kernel"] + weights["router.bias"], CHOSEN)
    of = lambda name, x, how: jnp.einsum(how, x, weights[f"experts.{name}"]) + weights[f"experts.{name}_bias"]
    gate = jnp.minimum(of("wi_0", normed, "bte,xef->btxf"), LIMIT)
    up = jnp.clip(of("wi_1", normed, "bte,xef->btxf"), -LIMIT, LIMIT)
    made = of("wo", gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), "btxf,xfe->btxe")
    return x + jnp.einsum("btx,btxe->bte", shares, made)


def latent(x, weights):
    """Attention whose queries, keys and values come from narrow vectors, with rotated parts of their own."""
    query = jnp.einsum("btr,rhd->bthd", rms(x @ weights["attention.wq_a.kernel"], weights["attention.q_norm.scale"]),
                       weights["attention.wq_b.kernel"])
    narrow = x @ weights["attention.wkv_a.kernel"]
    narrow, shared = narrow[..., :LATENT], narrow[..., LATENT:]
    wide = jnp.einsum("btr,rhd->bthd", rms(narrow, weights["attention.kv_norm.scale"]), weights["attention.wkv_b.kernel"])
    key, value = wide[..., :PLAIN], wide[..., PLAIN:]
    shared = rotated(shared[:, :, None, :], 1e4, dims=ROTATED)
    query = jnp.concatenate([query[..., :PLAIN], rotated(query[..., PLAIN:], 1e4, dims=ROTATED)], -1)
    key = jnp.concatenate([key, jnp.repeat(shared, HEADS, 2)], -1)
    return out(attended(query * (PLAIN + ROTATED) ** -0.5, key, value), weights)


def deepseek(x, weights, layer):
    """Latent attention; a dense layer, then experts by sigmoids beside one that all tokens share."""
    x += latent(rms(x, weights["pre_attention_norm.scale"]), weights)
    normed = rms(x, weights["pre_mlp_norm.scale"])
    if layer == 0:
        return x + gated(normed, weights, jax.nn.silu)
    scores = jax.nn.sigmoid(normed @ weights["router.kernel"])
    # The bias chooses experts and has no gradient.
    biased = jax.lax.stop_gradient(scores + weights["router.bias"])
    shares = chosen(biased, lambda mask: scores * mask / jnp.sum(scores * mask, -1, keepdims=True), CHOSEN) * ROUTED
    of_shared = {name.removeprefix("shared."): value for name, value in weights.items() if name.startswith("shared.")}
    return x + mixed(normed, weights, shares) + gated(normed, of_shared, jax.nn.silu)


LAYERS_OF = {"llama2": llama2, "gemma2": gemma2, "gemma3": gemma3, "gpt3": gpt3}
# Families whose states MaxText's checkpoints have, beside the first three.
MIXTURES = {"mixtral": mixtral, "gpt_oss": gpt_oss, "deepseek": deepseek}
EXPERTS, CHOSEN, LIMIT, ROUTED = 4, 2, 7.0, 2.5
# Widths of latent attention: of queries, of keys and values, of the parts of a head, and of values.
NARROW, LATENT, PLAIN, ROTATED, VALUE = 8, 7, 4, 2, 5
GEMMAS = ("gemma2", "gemma3")
# The factor in stored query kernels.
QUERY = {"llama2": HEAD**-0.5, "mixtral": HEAD**-0.5, "gemma2": 10.0**-0.5}
# The offset of stored norm scales. Published Gemma scales are around 0.
NORM = {"gemma2": 1.0, "gemma3": 1.0, "gpt3": -1.0}


def shapes(family, tied):
    kv_heads = HEADS if family == "gpt3" else 1
    of_layer = {
        "attention.query.kernel": (WIDTH, HEADS, HEAD),
        "attention.key.kernel": (WIDTH, kv_heads, HEAD),
        "attention.value.kernel": (WIDTH, kv_heads, HEAD),
        "attention.out.kernel": (HEADS, HEAD, WIDTH),
        "mlp.wi_0.kernel": (WIDTH, WITHIN),
        "mlp.wo.kernel": (WITHIN, WIDTH),
        "pre_attention_norm.scale": (WIDTH,),
        "pre_mlp_norm.scale": (WIDTH,),
    }
    of_model = {"token_embedder.embedding": (VOCABULARY, WIDTH), "final_norm.scale": (WIDTH,)}
    if not tied:
        of_model["head.kernel"] = (WIDTH, VOCABULARY)
    if family == "gpt3":
        of_layer |= {f"attention.{name}.bias": (HEADS, HEAD) for name in ("query", "key", "value")}
        of_layer |= {"mlp.wi_0.bias": (WITHIN,), "mlp.wo.bias": (WIDTH,), "attention.out.bias": (WIDTH,)}
        of_layer |= {f"{name}.bias": (WIDTH,) for name in ("pre_attention_norm", "pre_mlp_norm")}
        of_model |= {"final_norm.bias": (WIDTH,), "positions.table": (LENGTH, WIDTH)}
    else:
        of_layer["mlp.wi_1.kernel"] = (WIDTH, WITHIN)
    if family in GEMMAS:
        of_layer |= {f"{name}.scale": (WIDTH,) for name in ("post_attention_norm", "post_mlp_norm")}
    if family == "gemma3":
        of_layer |= {f"attention.{name}_norm.scale": (HEAD,) for name in ("query", "key")}
    if family in MIXTURES:
        return of_model | of_mixtures(family, of_layer)
    return of_model | {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in of_layer.items()}


def of_mixtures(family, of_layer):
    """The shapes of layers with experts."""
    dense = ("mlp.wi_0.kernel", "mlp.wi_1.kernel", "mlp.wo.kernel")
    feed_forward = {name: of_layer.pop(name) for name in dense}
    experts = {"router.kernel": (WIDTH, EXPERTS), "experts.wo": (EXPERTS, WITHIN, WIDTH)}
    experts |= {f"experts.{name}": (EXPERTS, WIDTH, WITHIN) for name in ("wi_0", "wi_1")}
    if family == "gpt_oss":
        of_layer |= {f"attention.{name}.bias": of_layer[f"attention.{name}.kernel"][1:] for name in ("query", "key", "value")}
        of_layer |= {"attention.out.bias": (WIDTH,), "attention.sinks": (HEADS,)}
        experts |= {"router.bias": (EXPERTS,), "experts.wo_bias": (EXPERTS, WIDTH)}
        experts |= {f"experts.{name}_bias": (EXPERTS, WITHIN) for name in ("wi_0", "wi_1")}
    if family == "deepseek":
        of_layer = {name: shape for name, shape in of_layer.items() if not name.startswith("attention.")}
        of_layer |= {
            "attention.wq_a.kernel": (WIDTH, NARROW),
            "attention.wq_b.kernel": (NARROW, HEADS, PLAIN + ROTATED),
            "attention.wkv_a.kernel": (WIDTH, LATENT + ROTATED),
            "attention.wkv_b.kernel": (LATENT, HEADS, PLAIN + VALUE),
            "attention.out.kernel": (HEADS, VALUE, WIDTH),
            "attention.q_norm.scale": (NARROW,),
            "attention.kv_norm.scale": (LATENT,),
        }
        experts |= {"router.bias": (EXPERTS,)} | {f"shared.{name}": shape for name, shape in feed_forward.items()}
    of = lambda layer: of_layer | (feed_forward if family == "deepseek" and layer == 0 else experts)
    return {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in of(i).items()}


def form(family, name):
    """The scale and the offset that turn a published weight into the stored one."""
    if name.endswith("query.kernel") and family in QUERY:
        return QUERY[family], 0.0
    if name == "token_embedder.embedding" and family in GEMMAS:
        return WIDTH**0.5, 0.0
    return 1.0, NORM.get(family, 0.0) if name.endswith("norm.scale") else 0.0


def first(family, name, shape):
    """An initial value in the stored form."""
    scale, offset = form(family, name)
    numbers = random.normal(size=shape) * (WIDTH**-0.5 if name.endswith("kernel") else 0.4)
    is_around_one = name.endswith("norm.scale") and family not in GEMMAS
    return np.float32((numbers + is_around_one) * scale + offset).astype(np.float64)


def loss(weights, family, tied):
    x = weights["token_embedder.embedding"][tokens]
    if family == "gpt3":
        x += weights["positions.table"][positions]
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        x = (LAYERS_OF | MIXTURES)[family](x, own, layer)
    x = layer_norm(x, weights, "final_norm") if family == "gpt3" else rms(x, weights["final_norm.scale"])
    if tied:
        logits = x @ weights["token_embedder.embedding"].T
        # `normalize_embedding_logits`.
        logits = logits if family == "gpt3" else logits / WIDTH**0.5
    else:
        logits = x @ weights["head.kernel"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return jnp.sum(losses * (segments != 0)) / jnp.sum(segments != 0)


def falling(step):
    share = 0.5 * (jnp.cos(jnp.pi * step / (SCHEDULE - WARMUP - 1)) + 1)
    return PEAK * share + PEAK * FINAL_FRACTION * (1 - share)


schedule = optax.join_schedules([optax.linear_schedule(0.0, PEAK, WARMUP), falling], [WARMUP])
