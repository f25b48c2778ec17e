"""Writes memories_*.safetensors: whole models with memories of n-grams and with residual streams, in float64.

Needs numpy and safetensors. The models follow the papers' equations (DeepSeek-V3, mHC, mHC-lite, Engram), token by token
where a token looks back: documents are computed one by one, so that nothing has to be masked. Parameters have this
project's names and shapes, those of layers preceded by the layer's index. The tokenizer is the one of bytes.
"""

import itertools
import pathlib
import unicodedata

import numpy as np
from safetensors.numpy import save_file

EMBED, HEADS, LAYERS, VOCAB, EPSILON = 12, 2, 4, 263, 1e-5
QUERY_LATENT, LATENT, PLAIN, ROTATED, VALUE = 7, 5, 6, 4, 3
MLP, EXPERTS, CHOSEN, EXPERT_MLP, SCALING = 20, 5, 2, 9, 2.5
MEMORIES, TABLES, WIDTH, BASES, LONGEST, TAPS, SEED = [2, 0], 2, 3, [41, 60], 3, 3, 5
DOCUMENTS = [[5, 8], [13]]
LENGTH = 13


def rms(x, scale=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# The vocabulary of bytes: three special tokens, then each byte as a token.
def byte_name(byte):
    """The character that stands for a byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def compressed():
    texts = ["<|pad|>", "<|begin_of_text|>", "<|end_of_text|>"]
    keys = list(texts)
    for byte in range(256):
        if byte >= 128:
            keys.append(byte_name(byte))
            continue
        text = chr(byte)
        normal = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        normal = "".join(c for c in normal if unicodedata.category(c) != "Mn").lower()
        if normal in " \t\r\n":
            normal = " "
        else:
            normal = normal.strip()
        keys.append(normal or text)
    known = {}
    return np.array([known.setdefault(key, len(known)) for key in keys]), len(known)


NUMBERS, NUM_NUMBERS = compressed()
PADDING = int(NUMBERS[0])


def is_prime(n):
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def hashes():
    """Multipliers and sizes of tables of each layer with a memory."""
    taken, made = set(), {}
    for layer in MEMORIES:
        bound = max(1, (2**31 - 1) // NUM_NUMBERS // 2)
        generator = np.random.default_rng(SEED + 10007 * layer)
        multipliers = generator.integers(0, bound, LONGEST, dtype=np.int32).astype(np.int64) * 2 + 1
        sizes = []
        for base in BASES:
            own, candidate = [], base
            while len(own) < TABLES:
                if is_prime(candidate) and candidate not in taken:
                    own.append(candidate)
                    taken.add(candidate)
                candidate += 1
            sizes.append(own)
        made[layer] = multipliers, sizes
    return made


HASHES = hashes()


def shapes(streams, lite, has_memories, modules):
    layer_norm = {"pre_attention_norm.scale": [EMBED], "pre_mlp_norm.scale": [EMBED]}
    attention = {
        "wq_a.kernel": [EMBED, QUERY_LATENT],
        "q_norm.scale": [QUERY_LATENT],
        "wq_b.kernel": [QUERY_LATENT, HEADS, PLAIN + ROTATED],
        "wkv_a.kernel": [EMBED, LATENT + ROTATED],
        "kv_norm.scale": [LATENT],
        "wkv_b.kernel": [LATENT, HEADS, PLAIN + VALUE],
        "out.kernel": [HEADS, VALUE, EMBED],
    }
    dense = {"mlp.wi_0.kernel": [EMBED, MLP], "mlp.wi_1.kernel": [EMBED, MLP], "mlp.wo.kernel": [MLP, EMBED]}
    experts = {
        "experts.gate.kernel": [EMBED, EXPERTS],
        "experts.gate.bias": [EXPERTS],
        "experts.wi_0": [EXPERTS, EMBED, EXPERT_MLP],
        "experts.wi_1": [EXPERTS, EMBED, EXPERT_MLP],
        "experts.wo": [EXPERTS, EXPERT_MLP, EMBED],
        "experts.shared.wi_0.kernel": [EMBED, EXPERT_MLP],
        "experts.shared.wi_1.kernel": [EMBED, EXPERT_MLP],
        "experts.shared.wo.kernel": [EXPERT_MLP, EMBED],
    }
    mixing = [len(list(itertools.permutations(range(streams))))] if lite else [streams, streams]
    connection = {
        "mhc_norm.scale": [streams * EMBED],
        "pre_alpha": [streams * EMBED, streams],
        "post_alpha": [streams * EMBED, streams],
        "res_alpha": [streams * EMBED, int(np.prod(mixing))],
        "pre_beta": [streams],
        "post_beta": [streams],
        "res_beta": mixing,
        "pre_alpha_scale": [1],
        "post_alpha_scale": [1],
        "res_alpha_scale": [1],
    }
    memory = TABLES * len(BASES) * WIDTH
    engram = {
        "key_proj.kernel": [memory, streams, EMBED],
        "key_proj.bias": [streams, EMBED],
        "value_proj.kernel": [memory, EMBED],
        "value_proj.bias": [EMBED],
        "k_norm.scale": [streams, EMBED],
        "q_norm.scale": [streams, EMBED],
        "short_conv.norm.scale": [streams, EMBED],
        "short_conv.conv.kernel": [TAPS, 1, streams * EMBED],
    }

    def layer(prefix, index):
        own = {**layer_norm, **{f"latent_attention.{name}": shape for name, shape in attention.items()}}
        own |= dense if index == 0 else experts
        if streams > 1:
            for part in ["mhc_attention", "mhc_mlp"]:
                own |= {f"{part}.{name}": shape for name, shape in connection.items()}
        if has_memories and index in MEMORIES:
            own |= {f"engram.{name}": shape for name, shape in engram.items()}
            entries = int(sum(map(sum, HASHES[index][1])))
            own["engram.multi_head_embedding.embedding.embedding"] = [entries, WIDTH]
            own["engram_layer_norm.scale"] = [EMBED]
        return {f"{prefix}{name}": shape for name, shape in own.items()}

    made = {"token_embedder.embedding": [VOCAB, EMBED], "final_norm.scale": [EMBED], "head.kernel": [EMBED, VOCAB]}
    for index in range(LAYERS):
        made |= layer(f"{index}.", index)
    for module in range(modules):
        made |= {
            f"predictions.{module}.embedding_norm.scale": [EMBED],
            f"predictions.{module}.hidden_norm.scale": [EMBED],
            f"predictions.{module}.projection.kernel": [2 * EMBED, EMBED],
        }
        # The layers of modules have no memory.
        made |= layer(f"predictions.{module}.layer.", LAYERS - 1)
    return made


def value(random, name, shape):
    noise = random.standard_normal(shape)
    if name.endswith("norm.scale"):
        return 1 + 0.3 * noise
    if name.endswith(("beta", "bias")):
        return 0.4 * noise
    if name.endswith("alpha_scale"):
        return 0.5 + 0.1 * noise
    if name.endswith("embedding"):
        return 0.7 * noise
    if name.endswith("conv.kernel"):
        return 0.5 * noise
    inputs = shape[0] * shape[1] if name.endswith("out.kernel") else shape[-2] if "experts.w" in name else shape[0]
    return noise / np.sqrt(inputs)


class Model:
    def __init__(self, parameters, streams, lite, iterations, modules):
        self.p, self.streams, self.lite = parameters, streams, lite
        self.iterations, self.modules = iterations, modules

    def attention(self, a, x):
        """Attention of a document's tokens, [token, embed]."""
        length = len(x)
        q = np.einsum("tl,lhd->thd", rms(x @ a("wq_a.kernel"), a("q_norm.scale")), a("wq_b.kernel"))
        joint = x @ a("wkv_a.kernel")
        latent, shared = rms(joint[:, :LATENT], a("kv_norm.scale")), joint[:, LATENT:]
        kv = np.einsum("tl,lhd->thd", latent, a("wkv_b.kernel"))

        def rotate(vector, position):
            out = vector.copy()
            for pair in range(ROTATED // 2):
                angle = position * 10000.0 ** (-2 * pair / ROTATED)
                one, other = vector[..., 2 * pair], vector[..., 2 * pair + 1]
                out[..., 2 * pair] = one * np.cos(angle) - other * np.sin(angle)
                out[..., 2 * pair + 1] = one * np.sin(angle) + other * np.cos(angle)
            return out

        out = np.zeros((length, EMBED))
        keys = [rotate(shared[t], t) for t in range(length)]
        for t in range(length):
            rotated = rotate(q[t, :, PLAIN:], t)
            for head in range(HEADS):
                scores = [q[t, head, :PLAIN] @ kv[s, head, :PLAIN] + rotated[head] @ keys[s] for s in range(t + 1)]
                weights = softmax(np.array(scores) * (PLAIN + ROTATED) ** -0.5)
                out[t] += weights @ kv[: t + 1, head, PLAIN:] @ a("out.kernel")[head]
        return out

    def feed_forward(self, a, x):
        def unit(x, gate, up, down):
            return (silu(x @ gate) * (x @ up)) @ down

        if a("mlp.wo.kernel") is not None:
            return unit(x, *[a(f"mlp.{name}.kernel") for name in ["wi_0", "wi_1", "wo"]])
        scores = sigmoid(x @ a("experts.gate.kernel"))
        out = unit(x, *[a(f"experts.shared.{name}.kernel") for name in ["wi_0", "wi_1", "wo"]])
        for t in range(len(x)):
            chosen = np.argsort(-(scores[t] + a("experts.gate.bias")))[:CHOSEN]
            total = scores[t, chosen].sum() + 1e-20
            for e in chosen:
                own = unit(x[t], a("experts.wi_0")[e], a("experts.wi_1")[e], a("experts.wo")[e])
                out[t] += scores[t, e] / total * SCALING * own
        return out

    def memory(self, a, layer, x, tokens):
        """The memory's summand of the streams, [token, stream, embed]."""
        multipliers, sizes = HASHES[layer]
        table = a("engram.multi_head_embedding.embedding.embedding")
        values = np.zeros_like(x)
        normed = rms(x, a("engram_layer_norm.scale"))
        for t in range(len(x)):
            last = [int(NUMBERS[tokens[t - k]]) if t >= k else PADDING for k in range(LONGEST)]
            entries, first = [], 0
            for count, own in zip(range(2, LONGEST + 1), sizes):
                mixed = 0
                for k in range(count):
                    mixed ^= last[k] * int(multipliers[k])
                for size in own:
                    entries.append(table[first + mixed % size])
                    first += size
            e = np.concatenate(entries)
            value = e @ a("engram.value_proj.kernel") + a("engram.value_proj.bias")
            for g in range(x.shape[1]):
                key = e @ a("engram.key_proj.kernel")[:, g] + a("engram.key_proj.bias")[g]
                key = rms(key, a("engram.k_norm.scale")[g])
                query = rms(normed[t, g], a("engram.q_norm.scale")[g])
                logit = key @ query / np.sqrt(EMBED)
                assert abs(logit) > 1e-3, "the root would multiply rounding errors"
                values[t, g] = sigmoid(np.sign(logit) * np.sqrt(max(abs(logit), 1e-6))) * value
        out = values.copy()
        kernel = a("engram.short_conv.conv.kernel").reshape(TAPS, x.shape[1], EMBED)
        for t in range(len(x)):
            total = np.zeros_like(values[t])
            for tap in range(TAPS):
                earlier = t - (TAPS - 1 - tap) * LONGEST
                if earlier >= 0:
                    total += kernel[tap] * rms(values[earlier], a("engram.short_conv.norm.scale"))
            out[t] += silu(total)
        return out

    def connected(self, a, streams, part):
        """The streams after a part, [token, stream, embed]."""
        if self.streams == 1:
            return streams + part(streams[:, 0])[:, None]
        count = self.streams
        flat = rms(streams.reshape(len(streams), -1), a("mhc_norm.scale"))
        pre = sigmoid(a("pre_alpha_scale") * (flat @ a("pre_alpha")) + a("pre_beta")) + 1e-6
        post = 2 * sigmoid(a("post_alpha_scale") * (flat @ a("post_alpha")) + a("post_beta"))
        logits = a("res_alpha_scale") * (flat @ a("res_alpha")) + a("res_beta").reshape(-1)
        out = np.zeros_like(streams)
        output = part(np.einsum("ts,tse->te", pre, streams))
        for t in range(len(streams)):
            if self.lite:
                mixing = np.zeros((count, count))
                for weight, order in zip(softmax(logits[t]), itertools.permutations(range(count))):
                    for row, column in enumerate(order):
                        mixing[row, column] += weight
            else:
                mixing = softmax(logits[t].reshape(count, count)) + 1e-6
                mixing = mixing / (mixing.sum(0, keepdims=True) + 1e-6)
                for _ in range(self.iterations - 1):
                    mixing = mixing / (mixing.sum(1, keepdims=True) + 1e-6)
                    mixing = mixing / (mixing.sum(0, keepdims=True) + 1e-6)
            out[t] = mixing.T @ streams[t] + post[t][:, None] * output[t]
        return out

    def layer(self, prefix, layer, streams, tokens):
        def of(*names):
            return lambda name: self.p.get(prefix + ".".join([*names, name]))

        a = of()
        if a("engram_layer_norm.scale") is not None:
            streams = streams + self.memory(a, layer, streams, tokens)
        attend = lambda x: self.attention(of("latent_attention"), rms(x, a("pre_attention_norm.scale")))
        streams = self.connected(of("mhc_attention"), streams, attend)
        return self.connected(of("mhc_mlp"), streams, lambda x: self.feed_forward(a, rms(x, a("pre_mlp_norm.scale"))))

    def logits(self, tokens):
        """The logits of the model and of each module for one document."""
        p = self.p
        embed = lambda tokens: p["token_embedder.embedding"][tokens]
        head = lambda x: rms(x, p["final_norm.scale"]) @ p["head.kernel"]
        streams = np.repeat(embed(tokens)[:, None], self.streams, 1)
        for index in range(LAYERS):
            streams = self.layer(f"{index}.", index, streams, tokens)
        x = streams.sum(1)
        made = [head(x)]
        for module in range(self.modules):
            own = lambda name: p[f"predictions.{module}.{name}"]
            later = [tokens[t + module + 1] if t + module + 1 < len(tokens) else 0 for t in range(len(tokens))]
            both = [rms(embed(later), own("embedding_norm.scale")), rms(x, own("hidden_norm.scale"))]
            x = np.concatenate(both, -1) @ own("projection.kernel")
            x = self.layer(f"predictions.{module}.layer.", None, x[:, None], tokens)[:, 0]
            made.append(head(x))
        return made


def write(name, streams=1, lite=False, has_memories=True, modules=0, iterations=4, seed=3):
    random = np.random.default_rng(seed)
    parameters = {
        key: value(random, key, shape).astype(np.float32)
        for key, shape in shapes(streams, lite, has_memories, modules).items()
    }
    wide = {key: array.astype(np.float64) for key, array in parameters.items()}
    model = Model(wide, streams, lite, iterations, modules)
    tokens = random.integers(3, 259, (len(DOCUMENTS), LENGTH))
    # Letters of both cases, digits and spaces, of which some share a number, and a repeated n-gram.
    tokens[1] = np.frombuffer(b"An ant: aN an", np.uint8) + 3
    logits = [np.zeros((len(DOCUMENTS), LENGTH, VOCAB)) for _ in range(1 + modules)]
    for row, sizes in enumerate(DOCUMENTS):
        first = 0
        for size in sizes:
            for whole, own in zip(logits, model.logits(tokens[row, first : first + size])):
                whole[row, first : first + size] = own
            first += size
    made = {f"logits_{index}": whole.astype(np.float32) for index, whole in enumerate(logits)}
    made["tokens"] = tokens.astype(np.int32)
    save_file(parameters | made, pathlib.Path(__file__).parent / f"memories_{name}.safetensors")


if __name__ == "__main__":
    write("one_stream", modules=1)
    write("streams", streams=3)
    write("lite", streams=3, lite=True, has_memories=False)
