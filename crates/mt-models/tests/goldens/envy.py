"""Writes `envy_*.safetensors`: tiny random models of the family `envy` and their results, computed from its equations in
f64.

    pip install safetensors==0.8.0 numpy==2.4.6
    python envy.py

Each file holds the parameters with MaxText's names and layouts of layers that are not scanned, `tokens`, `logits`, and
`hidden_0` (the input of the first layer) to `hidden_N` (the output of the last layer, before the final norm).
"""

import pathlib
import zlib

import numpy as np
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
ROWS, LENGTH, EPSILON = 2, 19, 1e-5


def rms(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def rotate(x, theta):
    """Rotates the pairs (i, i + d/2) of `[row, position, head, d]` by position / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x, layer, theta):
    query = np.einsum("rpd,dhk->rphk", x, layer["self_attention/query/kernel"])
    key = np.einsum("rpd,dhk->rphk", x, layer["self_attention/key/kernel"])
    value = np.einsum("rpd,dhk->rphk", x, layer["self_attention/value/kernel"])
    if "self_attention/query_norm/scale" in layer:
        query = rms(query, layer["self_attention/query_norm/scale"])
        key = rms(key, layer["self_attention/key_norm/scale"])
    query, key = rotate(query, theta), rotate(key, theta)
    shared_by = query.shape[2] // key.shape[2]
    key, value = key.repeat(shared_by, 2), value.repeat(shared_by, 2)
    scores = np.einsum("rphk,rqhk->rhpq", query, key) * query.shape[-1] ** -0.5
    causal = np.tril(np.ones((x.shape[1], x.shape[1]), bool))
    context = np.einsum("rhpq,rqhk->rphk", softmax(np.where(causal, scores, -np.inf)), value)
    return np.einsum("rphk,hkd->rpd", context, layer["self_attention/out/kernel"])


def experts(x, layer, chosen):
    """The most probable experts of each token, weighted by their probabilities among all experts."""
    probabilities = softmax(x @ layer["MoeBlock_0/gate/kernel"])
    output = np.zeros_like(x)
    for row, position in np.ndindex(x.shape[:2]):
        token, weights = x[row, position], probabilities[row, position]
        for expert in np.argsort(-weights)[:chosen]:
            hidden = silu(token @ layer["MoeBlock_0/wi_0"][expert]) * (token @ layer["MoeBlock_0/wi_1"][expert])
            output[row, position] += weights[expert] * (hidden @ layer["MoeBlock_0/wo"][expert])
    return output


def forward(tokens, parameters, case):
    x = parameters["token_embedder/embedding"][tokens]
    hidden = [x]
    for index in range(case["layers"]):
        prefix = f"decoder/layers_{index}/"
        layer = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
        x = x + attention(rms(x, layer["pre_self_attention_layer_norm/scale"]), layer, case["theta"])
        normed = rms(x, layer["post_self_attention_layer_norm/scale"])
        if "mlp/wo/kernel" in layer:
            gate, up = normed @ layer["mlp/wi_0/kernel"], normed @ layer["mlp/wi_1/kernel"]
            made = (silu(gate) * up) @ layer["mlp/wo/kernel"]
        else:
            made = experts(normed, layer, case["chosen"])
        if "post_ffw_norm/scale" in layer:
            made = rms(made, layer["post_ffw_norm/scale"])
        x = x + made
        hidden.append(x)
    x = rms(x, parameters["decoder/decoder_norm/scale"])
    if "decoder/logits_dense/kernel" in parameters:
        return x @ parameters["decoder/logits_dense/kernel"], hidden
    return x @ parameters["token_embedder/embedding"].T * case["width"] ** -0.5, hidden


def shapes(case):
    """The shape of each parameter, and the number of inputs that it sums; none for norms."""
    width, (query, keys, head) = case["width"], case["heads"]
    yield "token_embedder/embedding", (case["vocab"], width), 1
    yield "decoder/decoder_norm/scale", (width,), None
    if not case["tied"]:
        yield "decoder/logits_dense/kernel", (width, case["vocab"]), width
    for index in range(case["layers"]):
        layer = f"decoder/layers_{index}/"
        yield layer + "pre_self_attention_layer_norm/scale", (width,), None
        yield layer + "post_self_attention_layer_norm/scale", (width,), None
        if case["post_norm"]:
            yield layer + "post_ffw_norm/scale", (width,), None
        yield layer + "self_attention/query/kernel", (width, query, head), width
        yield layer + "self_attention/key/kernel", (width, keys, head), width
        yield layer + "self_attention/value/kernel", (width, keys, head), width
        yield layer + "self_attention/out/kernel", (query, head, width), query * head
        if case["qk_norm"]:
            yield layer + "self_attention/query_norm/scale", (head,), None
            yield layer + "self_attention/key_norm/scale", (head,), None
        if (index + 1) % case["step"]:
            yield layer + "mlp/wi_0/kernel", (width, case["mlp"]), width
            yield layer + "mlp/wi_1/kernel", (width, case["mlp"]), width
            yield layer + "mlp/wo/kernel", (case["mlp"], width), case["mlp"]
        else:
            yield layer + "MoeBlock_0/gate/kernel", (width, case["experts"]), width
            yield layer + "MoeBlock_0/wi_0", (case["experts"], width, case["moe"]), width
            yield layer + "MoeBlock_0/wi_1", (case["experts"], width, case["moe"]), width
            yield layer + "MoeBlock_0/wo", (case["experts"], case["moe"], width), case["moe"]


CASES = {
    # Two cycles and a remainder.
    "envy_every_second": dict(
        vocab=80, width=20, layers=5, heads=(6, 2, 8), mlp=28, moe=18, experts=5, chosen=1, step=2, theta=500000.0,
        qk_norm=True, post_norm=True, tied=True,
    ),
    # More experts than tokens, of which each token uses several.
    "envy_every_third": dict(
        vocab=90, width=16, layers=4, heads=(5, 5, 6), mlp=30, moe=12, experts=45, chosen=2, step=3, theta=100.0,
        qk_norm=False, post_norm=False, tied=False,
    ),
    "envy_one_expert": dict(
        vocab=70, width=24, layers=1, heads=(3, 1, 10), mlp=32, moe=26, experts=1, chosen=1, step=1, theta=1000.0,
        qk_norm=True, post_norm=False, tied=True,
    ),
}


def main():
    for name, case in CASES.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))

        def values(shape, inputs):
            noise = random.standard_normal(shape)
            return (1 + 0.3 * noise if inputs is None else 1.4 * noise * inputs**-0.5).astype(np.float32)

        parameters = {key: values(shape, inputs) for key, shape, inputs in shapes(case)}
        tokens = random.integers(0, case["vocab"], (ROWS, LENGTH))
        exact = {key: value.astype(np.float64) for key, value in parameters.items()}
        logits, hidden = forward(tokens, exact, case)
        made = {"logits": logits} | {f"hidden_{index}": state for index, state in enumerate(hidden)}
        made = {key: value.astype(np.float32) for key, value in made.items()}
        save_file(parameters | made | {"tokens": tokens.astype(np.int32)}, HERE / f"{name}.safetensors")
        print(f"{name}: deviation {logits.std():.2f}")


main()
