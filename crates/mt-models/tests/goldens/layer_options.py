"""Writes `option_*.safetensors`: tiny random models with options of layers that no published model has, and their
results, computed from the equations in f64.

    pip install safetensors==0.8.0 numpy==2.4.6
    python layer_options.py

Each file holds the parameters with MaxText's names and layouts of layers that are not scanned, `tokens`, `positions`,
`segments` (0 is padding), `logits`, and `whole_logits`: those of the same tokens as one document per row.
"""

import pathlib
import zlib

import numpy as np
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
LENGTH, EPSILON = 23, 1e-5
# The documents of each row. The rest of a row is padding.
ROWS = [[9, 3, 8], [1, 19]]


def rms(x, scale=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def rotate(x, positions, theta):
    """Rotates the pairs (i, i + d/2) of `[position, head, d]` by position / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def visible(query, keys, place, segments, case):
    """The places that a query sees, for one head. Mixtures of block attention choose chunks of places: the query's own,
    and those of its document with the largest products of the query and their mean key."""
    own = [key for key in range(len(segments)) if segments[key] == segments[place]]
    if case.get("full"):
        return own
    earlier = [key for key in own if key <= place]
    if "chunk" not in case:
        return earlier
    size, chosen = case["chunk"]
    current = place // size
    scores = {current: np.inf}
    for chunk in {key // size for key in earlier} - {current}:
        scores[chunk] = query @ keys[[key for key in own if key // size == chunk]].mean(0)
    best = sorted(scores, key=lambda chunk: -scores[chunk])[:chosen]
    return [key for key in earlier if key // size in best]


def attention(x, layer, positions, segments, case):
    """Attention within one row `[position, width]`."""
    query, key, value = (
        np.einsum("pd,dhk->phk", x, layer[f"self_attention/{name}/kernel"]) for name in ("query", "key", "value")
    )
    if case["norm"] == "scaled":
        query = rms(query, layer["self_attention/query_norm/scale"])
        key = rms(key, layer["self_attention/key_norm/scale"])
    elif case["norm"] == "heads":
        query, key = rms(query), rms(key)
    elif case["norm"] == "all":
        query, key = (rms(both.reshape(len(x), -1)).reshape(both.shape) for both in (query, key))
    query, key = (rotate(both, positions, case["theta"]) for both in (query, key))
    shared_by = query.shape[1] // key.shape[1]
    context = np.zeros_like(query)
    for head in range(query.shape[1]):
        keys, values = key[:, head // shared_by], value[:, head // shared_by]
        for place in range(len(x)):
            if segments[place] == 0:
                continue
            own = query[place, head]
            seen = visible(own, keys, place, segments, case)
            weights = softmax(keys[seen] @ own * own.size**-0.5)
            context[place, head] = weights @ values[seen]
    return np.einsum("phk,hkd->pd", context, layer["self_attention/out/kernel"])


def experts(x, layer, chosen):
    """The most probable experts of each token, weighted by their probabilities among those."""
    probabilities = softmax(x @ layer["moe_block/gate/kernel"])
    output = np.zeros_like(x)
    for place, token in enumerate(x):
        best = np.argsort(-probabilities[place])[:chosen]
        weights = probabilities[place][best] / probabilities[place][best].sum()
        for expert, weight in zip(best, weights):
            hidden = silu(token @ layer["moe_block/wi_0"][expert]) * (token @ layer["moe_block/wi_1"][expert])
            output[place] += weight * (hidden @ layer["moe_block/wo"][expert])
    return output


def forward(tokens, positions, segments, parameters, case):
    x = parameters["token_embedder/embedding"][tokens]
    for index in range(case["layers"]):
        prefix = f"decoder/layers_{index}/"
        layer = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
        attended = attention(rms(x, layer["pre_self_attention_layer_norm/scale"]), layer, positions, segments, case)
        if "latent" in case:
            made = experts(rms(attended, layer["latent_norm/scale"]), layer, case["chosen"])
            x = x + (made @ layer["layer_up_projection/kernel"] if "layer_up_projection/kernel" in layer else made)
            continue
        x = x + attended
        normed = rms(x, layer["post_self_attention_layer_norm/scale"])
        gate, up = normed @ layer["mlp/wi_0/kernel"], normed @ layer["mlp/wi_1/kernel"]
        x = x + (silu(gate) * up) @ layer["mlp/wo/kernel"]
    return rms(x, parameters["decoder/decoder_norm/scale"]) @ parameters["decoder/logits_dense/kernel"]


def shapes(case):
    """The shape of each parameter, and the number of inputs that it sums; none for norms."""
    width, (query, keys, head) = case["width"], case["heads"]
    latent = case.get("latent", width)
    yield "token_embedder/embedding", (case["vocab"], width), 1
    yield "decoder/decoder_norm/scale", (width,), None
    yield "decoder/logits_dense/kernel", (width, case["vocab"]), width
    for index in range(case["layers"]):
        layer = f"decoder/layers_{index}/"
        yield layer + "pre_self_attention_layer_norm/scale", (width,), None
        yield layer + "self_attention/query/kernel", (width, query, head), width
        yield layer + "self_attention/key/kernel", (width, keys, head), width
        yield layer + "self_attention/value/kernel", (width, keys, head), width
        yield layer + "self_attention/out/kernel", (query, head, latent), query * head
        if case["norm"] == "scaled":
            yield layer + "self_attention/query_norm/scale", (head,), None
            yield layer + "self_attention/key_norm/scale", (head,), None
        if "latent" in case:
            yield layer + "latent_norm/scale", (latent,), None
            yield layer + "moe_block/gate/kernel", (latent, case["experts"]), latent
            yield layer + "moe_block/wi_0", (case["experts"], latent, case["moe"]), latent
            yield layer + "moe_block/wi_1", (case["experts"], latent, case["moe"]), latent
            yield layer + "moe_block/wo", (case["experts"], case["moe"], latent), case["moe"]
            if latent != width:
                yield layer + "layer_up_projection/kernel", (latent, width), latent
        else:
            yield layer + "post_self_attention_layer_norm/scale", (width,), None
            yield layer + "mlp/wi_0/kernel", (width, case["mlp"]), width
            yield layer + "mlp/wi_1/kernel", (width, case["mlp"]), width
            yield layer + "mlp/wo/kernel", (case["mlp"], width), case["mlp"]


CASES = {
    # Tokens see later ones of their document, too.
    "option_full": dict(
        vocab=60, width=20, layers=2, heads=(6, 2, 8), mlp=28, theta=1000.0, norm="none", full=True,
    ),
    # Norms of queries and keys without scales, of each head.
    "option_unscaled_heads": dict(
        vocab=50, width=18, layers=3, heads=(3, 3, 6), mlp=26, theta=500.0, norm="heads",
    ),
    # The same, chunks of 4 of which a query sees 2, and documents that begin inside of chunks.
    "option_block_attention": dict(
        vocab=60, width=20, layers=2, heads=(6, 2, 8), mlp=28, theta=1000.0, norm="heads", chunk=(4, 2),
    ),
    # Every query sees its own chunk only.
    "option_one_chunk": dict(
        vocab=40, width=12, layers=1, heads=(3, 1, 6), mlp=18, theta=1000.0, norm="none", chunk=(5, 1),
    ),
    # Experts that read the output of attention, which is narrower than the residual stream.
    "option_narrow_experts": dict(
        vocab=60, width=20, layers=3, heads=(6, 2, 8), theta=1000.0, norm="scaled", latent=14, experts=5, chosen=2, moe=10,
    ),
    # The same without another width.
    "option_equal_experts": dict(
        vocab=40, width=16, layers=1, heads=(3, 1, 6), theta=1000.0, norm="none", latent=16, experts=7, chosen=3, moe=9,
    ),
}


def main():
    for name, case in CASES.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))

        def values(shape, inputs):
            noise = random.standard_normal(shape)
            return (1 + 0.3 * noise if inputs is None else 1.4 * noise * inputs**-0.5).astype(np.float32)

        parameters = {key: values(shape, inputs) for key, shape, inputs in shapes(case)}
        tokens = random.integers(0, case["vocab"], (len(ROWS), LENGTH))
        positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, documents in enumerate(ROWS):
            place = 0
            for number, size in enumerate(documents, 1):
                positions[row, place : place + size] = np.arange(size)
                segments[row, place : place + size] = number
                place += size
        exact = {key: value.astype(np.float64) for key, value in parameters.items()}
        whole = (np.arange(LENGTH), np.ones(LENGTH, int))
        rows = range(len(ROWS))
        logits = np.stack([forward(tokens[row], positions[row], segments[row], exact, case) for row in rows])
        whole_logits = np.stack([forward(tokens[row], *whole, exact, case) for row in rows])
        made = {"logits": logits.astype(np.float32), "whole_logits": whole_logits.astype(np.float32)}
        batch = {"tokens": tokens, "positions": positions, "segments": segments}
        batch = {key: value.astype(np.int32) for key, value in batch.items()}
        save_file(parameters | made | batch, HERE / f"{name}.safetensors")
        print(f"{name}: deviation {logits.std():.2f}")


main()
