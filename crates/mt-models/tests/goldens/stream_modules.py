"""Writes stream_modules.safetensors: a small DeepSeek-V4 whose module predicts a further token, in float64; and
families/deepseek4_predicting, the same weights as DeepSeek's files have them.

Needs numpy and safetensors. The layers follow the equations of DeepSeek-V4 with a window alone, the module those of
`MTPBlock` in the program that accompanies its weights: every stream is the projection of its normalized self plus the
projection of the normalized embedding of the next token; a layer follows, and weights of the module's own end the streams.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

from memories import rms, sigmoid, silu, softmax

EMBED, HEADS, WIDTH, ROTATED, LAYERS, VOCAB, STREAMS, EPSILON = 10, 4, 6, 4, 2, 61, 3, 1e-5
QUERY_LATENT, GROUPS, OUTPUT_LATENT, WINDOW = 7, 2, 5, 4
EXPERTS, CHOSEN, EXPERT_MLP, SCALING, LIMIT, ITERATIONS = 5, 2, 9, 1.5, 0.5, 4
DOCUMENTS, LENGTH = [[5, 8], [13]], 13

LAYER = {
    "pre_attention_norm.scale": [EMBED],
    "pre_mlp_norm.scale": [EMBED],
    "compressed_attention.wq_a.kernel": [EMBED, QUERY_LATENT],
    "compressed_attention.q_norm.scale": [QUERY_LATENT],
    "compressed_attention.wq_b.kernel": [QUERY_LATENT, HEADS, WIDTH],
    "compressed_attention.wkv.kernel": [EMBED, 1, WIDTH],
    "compressed_attention.kv_norm.scale": [WIDTH],
    "compressed_attention.sinks": [HEADS],
    "compressed_attention.o_a_proj.kernel": [GROUPS, HEADS // GROUPS * WIDTH, OUTPUT_LATENT],
    "compressed_attention.o_b_proj.kernel": [GROUPS * OUTPUT_LATENT, EMBED],
    "experts.gate.kernel": [EMBED, EXPERTS],
    "experts.gate.bias": [EXPERTS],
    "experts.wi_0": [EXPERTS, EMBED, EXPERT_MLP],
    "experts.wi_1": [EXPERTS, EMBED, EXPERT_MLP],
    "experts.wo": [EXPERTS, EXPERT_MLP, EMBED],
    "experts.shared.wi_0.kernel": [EMBED, EXPERT_MLP],
    "experts.shared.wi_1.kernel": [EMBED, EXPERT_MLP],
    "experts.shared.wo.kernel": [EXPERT_MLP, EMBED],
}
for part in ["mhc_attention", "mhc_mlp"]:
    for name, count in [("pre", STREAMS), ("post", STREAMS), ("res", STREAMS**2)]:
        LAYER[f"{part}.{name}_alpha"] = [STREAMS * EMBED, count]
        LAYER[f"{part}.{name}_beta"] = [count] if name != "res" else [STREAMS, STREAMS]
        LAYER[f"{part}.{name}_alpha_scale"] = [1]
HEAD = {"hc_head.hc_fn": [STREAMS * EMBED, STREAMS], "hc_head.hc_base": [STREAMS], "hc_head.hc_scale": [1]}
SHAPES = {
    "token_embedder.embedding": [VOCAB, EMBED],
    "final_norm.scale": [EMBED],
    "head.kernel": [EMBED, VOCAB],
    **HEAD,
    **{f"{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()},
    "predictions.0.embedding_norm.scale": [EMBED],
    "predictions.0.hidden_norm.scale": [EMBED],
    "predictions.0.e_proj.kernel": [EMBED, EMBED],
    "predictions.0.h_proj.kernel": [EMBED, EMBED],
    "predictions.0.final_norm.scale": [EMBED],
    **{f"predictions.0.{name}": shape for name, shape in HEAD.items()},
    **{f"predictions.0.layer.{name}": shape for name, shape in LAYER.items()},
}

random = np.random.default_rng(8)


def value(name, shape):
    noise = random.standard_normal(shape)
    if name.endswith("norm.scale"):
        return 1 + 0.3 * noise
    if name.endswith(("beta", "bias", "base", "sinks")):
        return 0.4 * noise
    if name.endswith(("alpha_scale", "hc_scale")):
        return 0.5 + 0.1 * noise
    if name.endswith("embedding"):
        return 0.7 * noise
    return noise / np.sqrt(shape[-2] if len(shape) == 3 and shape[1] != 1 and "wq_b" not in name else shape[0])


arrays = {name: value(name, shape).astype(np.float32) for name, shape in SHAPES.items()}
p = {name: array.astype(np.float64) for name, array in arrays.items()}


def rotated(vector, position):
    """Rotates the last dimensions, whose pairs are neighbors."""
    out = vector.copy()
    for pair in range(ROTATED // 2):
        angle = position * 10000.0 ** (-2 * pair / ROTATED)
        first = WIDTH - ROTATED + 2 * pair
        one, other = vector[..., first], vector[..., first + 1]
        out[..., first] = one * np.cos(angle) - other * np.sin(angle)
        out[..., first + 1] = one * np.sin(angle) + other * np.cos(angle)
    return out


def attention(a, x):
    a = lambda name, a=a: a(f"compressed_attention.{name}")
    latent = rms(x @ a("wq_a.kernel"), a("q_norm.scale"))
    queries = rms(np.einsum("tl,lhd->thd", latent, a("wq_b.kernel")))
    keys = rms(x @ a("wkv.kernel")[:, 0], a("kv_norm.scale"))
    queries = np.stack([rotated(q, t) for t, q in enumerate(queries)])
    keys = np.stack([rotated(k, t) for t, k in enumerate(keys)])
    out = np.zeros((len(x), EMBED))
    for t in range(len(x)):
        seen = range(max(0, t - WINDOW + 1), t + 1)
        heads = np.zeros((HEADS, WIDTH))
        for head in range(HEADS):
            scores = [queries[t, head] @ keys[s] * WIDTH**-0.5 for s in seen] + [a("sinks")[head]]
            weights = softmax(np.array(scores))[:-1]
            heads[head] = rotated(weights @ keys[list(seen)], -t)
        groups = heads.reshape(GROUPS, -1)
        latents = np.einsum("gf,gfl->gl", groups, a("o_a_proj.kernel")).reshape(-1)
        out[t] = latents @ a("o_b_proj.kernel")
    return out


def unit(x, gate, up, down):
    return (silu(np.minimum(x @ gate, LIMIT)) * np.clip(x @ up, -LIMIT, LIMIT)) @ down


def experts(a, x):
    out = unit(x, *[a(f"experts.shared.{name}.kernel") for name in ["wi_0", "wi_1", "wo"]])
    scores = np.sqrt(np.log1p(np.exp(x @ a("experts.gate.kernel"))))
    for t in range(len(x)):
        chosen = np.argsort(-(scores[t] + a("experts.gate.bias")))[:CHOSEN]
        total = scores[t, chosen].sum() + 1e-20
        for e in chosen:
            own = unit(x[t], *[a(f"experts.{name}")[e] for name in ["wi_0", "wi_1", "wo"]])
            out[t] += scores[t, e] / total * SCALING * own
    return out


def connected(a, streams, part):
    flat = rms(streams.reshape(len(streams), -1))
    of = lambda name: a(f"{name}_alpha_scale") * (flat @ a(f"{name}_alpha")) + a(f"{name}_beta").reshape(-1)
    pre, post, logits = sigmoid(of("pre")) + 1e-6, 2 * sigmoid(of("post")), of("res")
    output = part(np.einsum("ts,tse->te", pre, streams))
    out = np.zeros_like(streams)
    for t in range(len(streams)):
        mixing = softmax(logits[t].reshape(STREAMS, STREAMS)) + 1e-6
        mixing = mixing / (mixing.sum(0, keepdims=True) + 1e-6)
        for _ in range(ITERATIONS - 1):
            mixing = mixing / (mixing.sum(1, keepdims=True) + 1e-6)
            mixing = mixing / (mixing.sum(0, keepdims=True) + 1e-6)
        out[t] = mixing.T @ streams[t] + post[t][:, None] * output[t]
    return out


def layer(prefix, streams):
    a = lambda name: p[prefix + name]
    of = lambda part: lambda name: p[f"{prefix}{part}.{name}"]
    streams = connected(of("mhc_attention"), streams, lambda x: attention(a, rms(x, a("pre_attention_norm.scale"))))
    return connected(of("mhc_mlp"), streams, lambda x: experts(a, rms(x, a("pre_mlp_norm.scale"))))


def end(prefix, streams):
    flat = rms(streams.reshape(len(streams), -1))
    logits = p[f"{prefix}hc_scale"] * (flat @ p[f"{prefix}hc_fn"]) + p[f"{prefix}hc_base"]
    return np.einsum("ts,tse->te", sigmoid(logits) + 1e-6, streams)


def logits(tokens):
    embed = lambda tokens: p["token_embedder.embedding"][tokens]
    streams = np.repeat(embed(tokens)[:, None], STREAMS, 1)
    for index in range(LAYERS):
        streams = layer(f"{index}.", streams)
    made = [rms(end("hc_head.", streams), p["final_norm.scale"]) @ p["head.kernel"]]
    own = lambda name: p[f"predictions.0.{name}"]
    following = rms(embed([*tokens[1:], 0]), own("embedding_norm.scale"))
    streams = rms(streams, own("hidden_norm.scale")) @ own("h_proj.kernel")
    streams = layer("predictions.0.layer.", streams + (following @ own("e_proj.kernel"))[:, None])
    hidden = rms(end("predictions.0.hc_head.", streams), own("final_norm.scale"))
    return [*made, hidden @ p["head.kernel"]]


RELEASED = {
    "pre_attention_norm.scale": "attn_norm.weight",
    "pre_mlp_norm.scale": "ffn_norm.weight",
    "compressed_attention.wq_a.kernel": "attn.wq_a.weight",
    "compressed_attention.q_norm.scale": "attn.q_norm.weight",
    "compressed_attention.wq_b.kernel": "attn.wq_b.weight",
    "compressed_attention.wkv.kernel": "attn.wkv.weight",
    "compressed_attention.kv_norm.scale": "attn.kv_norm.weight",
    "compressed_attention.sinks": "attn.attn_sink",
    "compressed_attention.o_a_proj.kernel": "attn.wo_a.weight",
    "compressed_attention.o_b_proj.kernel": "attn.wo_b.weight",
    "experts.gate.kernel": "ffn.gate.weight",
    "experts.gate.bias": "ffn.gate.bias",
    "experts.shared.wi_0.kernel": "ffn.shared_experts.w1.weight",
    "experts.shared.wi_1.kernel": "ffn.shared_experts.w3.weight",
    "experts.shared.wo.kernel": "ffn.shared_experts.w2.weight",
}
AROUND = {
    "embedding_norm.scale": "enorm.weight", "hidden_norm.scale": "hnorm.weight", "final_norm.scale": "norm.weight",
    "e_proj.kernel": "e_proj.weight", "h_proj.kernel": "h_proj.weight",
}


def matrix(name, array):
    """Matrices of files have a row for each output."""
    if name.endswith("o_a_proj.kernel"):
        return np.concatenate([group.T for group in array])
    return array.reshape(len(array), -1).T if array.ndim > 1 else array


def of_head(prefix, theirs):
    return {f"{theirs}hc_head_{name}": matrix("", arrays[f"{prefix}hc_head.hc_{name}"]) for name in ["fn", "base", "scale"]}


def of_layer(prefix, theirs):
    """The tensors of a layer, by the names of DeepSeek's files."""
    made = {theirs + name: matrix(own, arrays[prefix + own]) for own, name in RELEASED.items()}
    for own, name in [("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")]:
        for expert, array in enumerate(arrays[f"{prefix}experts.{own}"]):
            made[f"{theirs}ffn.experts.{expert}.{name}.weight"] = array.T
    for own, name in [("mhc_attention", "attn"), ("mhc_mlp", "ffn")]:
        of = lambda end: [arrays[f"{prefix}{own}.{weights}_{end}"] for weights in ["pre", "post", "res"]]
        made[f"{theirs}hc_{name}_fn"] = np.concatenate([array.T for array in of("alpha")])
        made[f"{theirs}hc_{name}_base"] = np.concatenate([array.reshape(-1) for array in of("beta")])
        made[f"{theirs}hc_{name}_scale"] = np.concatenate(of("alpha_scale"))
    return made


def write_released():
    tensors = {
        "embed.weight": arrays["token_embedder.embedding"], "norm.weight": arrays["final_norm.scale"],
        "head.weight": arrays["head.kernel"].T, **of_head("", ""), **of_head("predictions.0.", "mtp.0."),
    }
    for layer in range(LAYERS):
        tensors |= of_layer(f"{layer}.", f"layers.{layer}.")
    tensors |= of_layer("predictions.0.layer.", "mtp.0.")
    tensors |= {f"mtp.0.{name}": matrix("", arrays[f"predictions.0.{own}"]) for own, name in AROUND.items()}
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": VOCAB, "hidden_size": EMBED,
        "moe_intermediate_size": EXPERT_MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": WIDTH, "qk_rope_head_dim": ROTATED, "q_lora_rank": QUERY_LATENT,
        "o_lora_rank": OUTPUT_LATENT, "o_groups": GROUPS, "sliding_window": WINDOW, "rms_norm_eps": EPSILON,
        "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "compress_ratios": [0] * (LAYERS + 1),
        "num_hash_layers": 0, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": CHOSEN,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": SCALING, "swiglu_limit": LIMIT,
        "hc_mult": STREAMS, "hc_sinkhorn_iters": ITERATIONS, "hc_eps": 1e-6, "num_nextn_predict_layers": 1,
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 64, "torch_dtype": "float32",
    }
    folder = pathlib.Path(__file__).parent / "families" / "deepseek4_predicting"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


write_released()
tokens = random.integers(0, VOCAB, (len(DOCUMENTS), LENGTH))
made = [np.zeros((len(DOCUMENTS), LENGTH, VOCAB)) for _ in range(2)]
for row, sizes in enumerate(DOCUMENTS):
    first = 0
    for size in sizes:
        for whole, own in zip(made, logits(tokens[row, first : first + size])):
            whole[row, first : first + size] = own
        first += size
arrays |= {f"logits_{index}": whole.astype(np.float32) for index, whole in enumerate(made)}
arrays["tokens"] = tokens.astype(np.int32)
save_file(arrays, pathlib.Path(__file__).parent / "stream_modules.safetensors")
