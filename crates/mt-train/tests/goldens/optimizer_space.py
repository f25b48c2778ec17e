"""Writes optimizer_space.safetensors: five steps of tiny models in plain JAX and optax, in f64. Weights are held, clipped,
decayed and stepped in the form that MaxText's checkpoints store.

Needs jax, optax, numpy and safetensors.

Layers multiply by the stored weights: query kernels include attention's scale, Gemma's embedding tables include the
root of the width, Gemma's norms multiply by `w` and GPT-3's by `1 + w`. Therefore no code here scales a gradient or a
weight explicitly.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

jax.config.update("jax_enable_x64", True)

VOCABULARY, WIDTH, HEADS, HEAD, WITHIN, LAYERS = 24, 12, 2, 6, 16, 2
ROWS, LENGTH, STEPS = 4, 10, 5
WINDOW, SOFT_CAP, NORM_EPSILON = 3, 2.5, 1e-6
# Constants of the schedule, of clipping, and of the optimizers. The epsilons are of the gradients' magnitude.
PEAK, FINAL_FRACTION, WARMUP, SCHEDULE, CLIP = 0.02, 0.1, 2, 8, 0.7
ADAM = dict(b1=0.9, b2=0.95, eps=1e-3, eps_root=1e-6)
DECAY, MUON_BETA, MUON_DECAY = 0.3, 0.95, 0.2

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


def rotated(x, max_timescale, factor=1.0):
    """x: [rows, positions, heads, width of a head]."""
    timescale = max_timescale ** (2 * jnp.arange(HEAD // 2) / HEAD) * factor
    angle = (positions[..., None] / timescale)[:, :, None, :]
    one, other = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def attended(query, key, value, window=None, cap=None):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, HEADS // key.shape[2], 2))
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    place = np.arange(LENGTH)
    seen = (segments[:, :, None] == segments[:, None, :]) & (place[:, None] >= place)
    if window:
        seen &= place[:, None] - place < window
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
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


LAYERS_OF = {"llama2": llama2, "gemma2": gemma2, "gemma3": gemma3, "gpt3": gpt3}
GEMMAS = ("gemma2", "gemma3")
# The factor in stored query kernels.
QUERY = {"llama2": HEAD**-0.5, "gemma2": 10.0**-0.5}
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
    return of_model | {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in of_layer.items()}


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
        x = LAYERS_OF[family](x, own, layer)
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


def matrix(name):
    """The input and output axes of a linear map, which Muon treats as a matrix."""
    if not name.startswith("layers.") or not name.endswith("kernel"):
        return None
    inputs, axes = (2, 3) if "attention.out" in name else (1, 2 if "mlp" in name else 3)
    return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, axes)))


def optimizer(kind, names):
    if kind == "adamw":
        return optax.adamw(schedule, weight_decay=DECAY, **ADAM)
    return optax.contrib.muon(
        schedule, ns_coeffs=(3.4445, -4.7750, 2.0315), beta=MUON_BETA, eps=ADAM["eps"], weight_decay=MUON_DECAY,
        adam_b1=ADAM["b1"], adam_b2=ADAM["b2"], adam_eps_root=ADAM["eps_root"], adam_weight_decay=DECAY,
        muon_weight_dimension_numbers={name: matrix(name) for name in names},
    )


def stacked(prefix, arrays):
    """Arrays by name, with layers stacked along the first axis."""
    of_model = {f"{prefix}.{name}": array for name, array in arrays.items() if not name.startswith("layers.")}
    roles = {name.removeprefix("layers.0.") for name in arrays if name.startswith("layers.0.")}
    layers = lambda role: np.stack([np.asarray(arrays[f"layers.{layer}.{role}"]) for layer in range(LAYERS)])
    return of_model | {f"{prefix}.layers.{role}": layers(role) for role in sorted(roles)}


integers = {"inputs": tokens, "targets": targets, "segmentation": segments, "positions": positions}
tensors = {f"batch.{name}": value.astype(np.int32) for name, value in integers.items()}
for family in LAYERS_OF:
    for tied in (True, False):
        model = f"{family}_{'tied' if tied else 'untied'}"
        start = {name: first(family, name, shape) for name, shape in shapes(family, tied).items()}
        tensors |= stacked(f"{model}.start", start)
        tensors |= stacked(f"{model}.form", {name: np.array(form(family, name)) for name in start})
        gradient = jax.jit(jax.value_and_grad(lambda weights: loss(weights, family, tied)))
        clip = optax.clip_by_global_norm(CLIP)
        for kind in ("adamw", "muon"):
            steps = optimizer(kind, start)
            weights, state = start, steps.init(start)
            reported = {"losses": [], "gradient_norms": [], "parameter_norms": []}
            for _ in range(STEPS):
                value, gradients = gradient(weights)
                clipped, _ = clip.update(gradients, clip.init(weights))
                updates, state = steps.update(clipped, state, weights)
                weights = optax.apply_updates(weights, updates)
                reported["losses"].append(value)
                reported["gradient_norms"].append(optax.global_norm(gradients))
                reported["parameter_norms"].append(optax.global_norm(weights))
            case = f"{model}.{kind}"
            tensors |= {f"{case}.{name}": np.array(values) for name, values in reported.items()}
            tensors |= stacked(f"{case}.update", {name: weights[name] - start[name] for name in start})
            # The norm of each moment.
            adam = state[0] if kind == "adamw" else state.inner_states["adam"].inner_state[0]
            of_matrices = {} if kind == "adamw" else state.inner_states["muon"].inner_state[0].mu
            for slot, moments in [("mu", of_matrices), ("mu", adam.mu), ("nu", adam.nu)]:
                arrays = {name: moment for name, moment in moments.items() if hasattr(moment, "shape")}
                norms = {name: np.linalg.norm(moment) for name, moment in arrays.items()}
                tensors |= stacked(f"{case}.{slot}", norms)
            print(case, *(np.round(values, 4) for values in reported.values()))

f32 = lambda array: np.asarray(array, np.int32 if array.dtype == np.int32 else np.float32)
written = {name: np.ascontiguousarray(f32(array)) for name, array in tensors.items()}
save_file(written, pathlib.Path(__file__).with_name("optimizer_space.safetensors"))
