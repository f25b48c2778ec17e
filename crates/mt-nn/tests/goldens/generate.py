"""Writes modules.safetensors: layers of Hugging Face transformers in f32, with gradients from PyTorch.

Needs torch, transformers 5.23 and safetensors. Each layer's name is the prefix of its
arguments, its result `y`, a cotangent, and under `gradient.` the gradients for this cotangent. Weights are in this
program's layout: [embed, heads, head_dim] instead of [heads * head_dim, embed].
"""

import pathlib

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Olmo3Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers import masking_utils as masks
from transformers.activations import ACT2FN
from transformers.cache_utils import KVSharingDict
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo3 import modeling_olmo3 as olmo3
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.whisper.modeling_whisper import sinusoids

torch.manual_seed(7)
tensors = {}


def record(name, y, integers, **arguments):
    """Differentiates y with respect to the arguments, which require gradients, and records all tensors."""
    cotangent = torch.randn_like(y)
    gradients = torch.autograd.grad((y * cotangent).sum(), list(arguments.values()))
    tensors[f"{name}.y"] = y
    tensors[f"{name}.cotangent"] = cotangent
    for (argument, value), gradient in zip(arguments.items(), gradients):
        tensors[f"{name}.{argument}"] = value
        tensors[f"{name}.gradient.{argument}"] = gradient
    for argument, value in integers.items():
        tensors[f"{name}.{argument}"] = value.to(torch.int32)


def leaf(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).requires_grad_()


def packed(*rows):
    """Segments and positions of rows that hold documents of these lengths."""
    segments = torch.tensor([[i + 1 for i, n in enumerate(row) for _ in range(n)] for row in rows])
    positions = torch.tensor([[p for n in row for p in range(n)] for row in rows])
    return segments, positions


def rms_norm():
    norm = llama.LlamaRMSNorm(13, eps=1e-5)
    norm.weight = torch.nn.Parameter(1.0 + 0.3 * torch.randn(13))
    x = leaf(2, 5, 13, scale=3.0)
    record("rms_norm", norm(x), {}, x=x, scale=norm.weight)


def rotary():
    config = LlamaConfig(hidden_size=24, num_attention_heads=3, head_dim=10, rope_theta=10000.0)
    embedding = llama.LlamaRotaryEmbedding(config)
    _, positions = packed([4, 3], [7])
    positions = positions * 37
    x = leaf(2, 7, 3, 10)
    cos, sin = embedding(x, positions)
    turned, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    record("rotary", turned, {"positions": positions}, x=x)


def attention(name, embed, heads, kv_heads, head_dim, rows):
    config = LlamaConfig(
        hidden_size=embed,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=10000.0,
        attn_implementation="eager",
    )
    layer = llama.LlamaAttention(config, layer_idx=0)
    segments, positions = packed(*rows)
    batch, length = segments.shape
    x = leaf(batch, length, embed)
    kernels = {
        "query": leaf(embed, heads, head_dim, scale=0.5),
        "key": leaf(embed, kv_heads, head_dim, scale=0.5),
        "value": leaf(embed, kv_heads, head_dim, scale=0.5),
        "out": leaf(heads, head_dim, embed, scale=0.5),
    }
    weights = {
        "q_proj.weight": kernels["query"].reshape(embed, -1).T,
        "k_proj.weight": kernels["key"].reshape(embed, -1).T,
        "v_proj.weight": kernels["value"].reshape(embed, -1).T,
        "o_proj.weight": kernels["out"].reshape(-1, embed).T,
    }
    allowed = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length).tril().bool()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
    angles = llama.LlamaRotaryEmbedding(config)(x, positions)
    y, _ = torch.func.functional_call(layer, weights, (x, angles, mask))
    record(name, y, {"segments": segments, "positions": positions}, x=x, **kernels)


def mlp():
    config = LlamaConfig(hidden_size=12, num_attention_heads=1, intermediate_size=29, hidden_act="silu")
    layer = llama.LlamaMLP(config)
    x = leaf(2, 5, 12)
    kernels = {"wi_0": leaf(12, 29), "wi_1": leaf(12, 29), "wo": leaf(29, 12)}
    names = {"gate_proj.weight": "wi_0", "up_proj.weight": "wi_1", "down_proj.weight": "wo"}
    weights = {name: kernels[ours].T for name, ours in names.items()}
    record("mlp", torch.func.functional_call(layer, weights, (x,)), {}, x=x, **kernels)


def embedding():
    table = leaf(11, 6)
    tokens = torch.tensor([[3, 3, 0, 10], [3, 5, 5, 7]])
    record("lookup", torch.nn.functional.embedding(tokens, table), {"tokens": tokens}, embedding=table)
    x = leaf(2, 3, 6)
    record("attend", x @ table.T, {}, x=x, embedding=table)


def cross_entropy():
    logits = leaf(2, 5, 17, scale=4.0)
    targets = torch.randint(0, 17, (2, 5))
    segments = torch.tensor([[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]])
    losses = torch.nn.functional.cross_entropy(logits.reshape(-1, 17), targets.reshape(-1), reduction="none")
    weights = (segments.reshape(-1) != 0).float()
    mean = (losses * weights).sum() / weights.sum()
    record("cross_entropy", mean, {"targets": targets, "segments": segments}, logits=logits)


def norms():
    x = leaf(2, 5, 13, scale=3.0)
    scale = leaf(13, scale=0.3)
    norm = gemma3.Gemma3RMSNorm(13, eps=1e-6)
    y = torch.func.functional_call(norm, {"weight": scale}, (x,))
    record("rms_norm_around_zero", y, {}, x=x, scale=scale)
    record("rms_norm_without_scale", gemma4.Gemma4RMSNorm(13, eps=1e-6, with_scale=False)(x), {}, x=x)
    bias = leaf(13)
    y = torch.nn.functional.layer_norm(x, (13,), scale, bias, eps=1e-3)
    record("layer_norm", y, {}, x=x, scale=scale, bias=bias)
    y = torch.nn.functional.layer_norm(x, (13,), scale + 1.0, bias, eps=1e-5)
    record("layer_norm_around_zero", y, {}, x=x, scale=scale, bias=bias)


def activations():
    x = leaf(2, 7, scale=2.0)
    for name in ["gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "silu", "linear"]:
        record(f"activation_{name}", ACT2FN[name](x), {}, x=x)


def mlps_with_biases():
    config = LlamaConfig(
        hidden_size=12, num_attention_heads=1, intermediate_size=29, hidden_act="gelu", mlp_bias=True
    )
    x = leaf(2, 5, 12)
    ours = {"wi_0": leaf(12, 29), "wi_1": leaf(12, 29), "wo": leaf(29, 12)}
    ours |= {"wi_0_bias": leaf(29), "wi_1_bias": leaf(29), "wo_bias": leaf(12)}
    weights = {}
    for theirs, name in [("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")]:
        weights |= {f"{theirs}.weight": ours[name].T, f"{theirs}.bias": ours[f"{name}_bias"]}
    y = torch.func.functional_call(llama.LlamaMLP(config), weights, (x,))
    record("mlp_with_biases", y, {}, x=x, **ours)

    config = GPT2Config(n_embd=12, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0)
    x = leaf(2, 5, 12)
    ours = {"wi_0": leaf(12, 17), "wi_0_bias": leaf(17), "wo": leaf(17, 12), "wo_bias": leaf(12)}
    theirs = ["c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"]
    weights = dict(zip(theirs, ours.values()))
    y = torch.func.functional_call(gpt2.GPT2MLP(17, config), weights, (x,))
    record("mlp_without_gate", y, {}, x=x, **ours)


def scaled_rotaries():
    _, positions = packed([4, 3], [7])
    positions = positions * 37
    x = leaf(2, 7, 3, 16)

    def rotated(name, cos, sin):
        turned, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
        record(f"rotary_{name}", turned, {"positions": positions}, x=x)

    def scaled(name, max_positions=256, **parameters):
        config = LlamaConfig(
            hidden_size=48,
            num_attention_heads=3,
            head_dim=16,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_theta": 10000.0, **parameters},
        )
        rotated(name, *llama.LlamaRotaryEmbedding(config)(x, positions))

    scaled("linear", rope_type="linear", factor=3.0)
    # 223 positions, for a model that was trained on 64.
    scaled("ntk", 64, rope_type="dynamic", factor=2.5)
    scaled(
        "llama3",
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled("yarn", **yarn, beta_fast=8.0, beta_slow=0.5)
    scaled("yarn_not_truncated", **yarn, beta_fast=8.0, beta_slow=0.5, truncate=False, attention_factor=1.25)
    # Both bounds of the interpolation are the same pair.
    scaled("yarn_sudden", **yarn, beta_fast=2000.0, beta_slow=1000.0)

    config = Qwen3NextConfig(
        hidden_size=48,
        num_attention_heads=3,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.375},
    )
    cos, sin = qwen3_next.Qwen3NextRotaryEmbedding(config)(x, positions)
    turned, _ = qwen3_next.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    record("rotary_leading", turned, {"positions": positions}, x=x)

    rotary = gemma4.Gemma4TextRotaryEmbedding(gemma4_config())
    cos, sin = rotary(x, positions, "full_attention")
    turned = gemma4.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)
    record("rotary_frequencies", turned, {"positions": positions}, x=x)


def positions():
    table = leaf(9, 6)
    places = torch.tensor([[0, 1, 2, 0], [5, 8, 5, 7]])
    y = torch.nn.functional.embedding(places, table)
    record("learned_positions", y, {"positions": places}, table=table)
    # The sum has a differentiable argument.
    x = leaf(2, 4, 10)
    record("sinusoidal_positions", x + sinusoids(9, 10)[places], {"positions": places}, x=x)


def gemma4_config():
    return Gemma4TextConfig(
        hidden_size=14,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=4,
        global_head_dim=16,
        num_global_key_value_heads=2,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        attention_k_eq_v=True,
        sliding_window=5,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1e6},
        },
        attn_implementation="eager",
    )


def mask(segments, *overlays):
    """The additive mask of causal attention within segments."""
    batch, length = segments.shape
    allowed = masks.and_masks(
        masks.causal_mask_function, masks.packed_sequence_mask_function(segments), *overlays
    )
    batches, places = torch.arange(batch)[:, None, None], torch.arange(length)
    allowed = allowed(batches, None, places[None, :, None], places[None, None, :])
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def chunks(size, batch):
    return masks.chunked_overlay(size, torch.zeros(batch, dtype=torch.int64))


def kernels_of(embed, heads, kv_heads, head_dim, biases=False, value=True, keys=True):
    """Kernels of attention, and biases, in this program's layout."""
    projections = {"query": heads}
    if keys:
        projections["key"] = kv_heads
    if keys and value:
        projections["value"] = kv_heads
    kernels = {name: leaf(embed, heads, head_dim, scale=0.5) for name, heads in projections.items()}
    kernels["out"] = leaf(heads, head_dim, embed, scale=0.5)
    if biases:
        kernels |= {f"{name}_bias": leaf(heads, head_dim, scale=0.5) for name, heads in projections.items()}
        kernels["out_bias"] = leaf(embed)
    return kernels


def weights_of(kernels):
    """The same parameters in the layout of transformers."""
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    embed = kernels["query"].shape[0]
    weights = {"o_proj.weight": kernels["out"].reshape(-1, embed).T}
    for ours, theirs in names.items():
        if ours in kernels:
            weights[f"{theirs}.weight"] = kernels[ours].reshape(embed, -1).T
        if f"{ours}_bias" in kernels:
            weights[f"{theirs}.bias"] = kernels[f"{ours}_bias"].flatten()
    if "out_bias" in kernels:
        weights["o_proj.bias"] = kernels["out_bias"]
    for ours, theirs in {"query_norm": "q_norm.weight", "key_norm": "k_norm.weight"}.items():
        if ours in kernels:
            weights[theirs] = kernels[ours].flatten()
    if "sinks" in kernels:
        weights["sinks"] = kernels["sinks"]
    return weights


def attention_variant(name, layer, rotary, embed, rows, kernels, overlay=None):
    """One layer of attention, with rotary embeddings if `rotary` is given."""
    segments, positions = packed(*rows)
    x = leaf(*segments.shape, embed)
    overlays = [overlay(segments.shape[0])] if overlay else []
    if rotary:
        angles = rotary(x, positions)
    else:
        angles = (torch.ones(*segments.shape, layer.head_dim), torch.zeros(*segments.shape, layer.head_dim))
    arguments = {
        "hidden_states": x,
        "position_embeddings": angles,
        "attention_mask": mask(segments, *overlays),
    }
    y, _ = torch.func.functional_call(layer, weights_of(kernels), (), arguments)
    record(name, y, {"segments": segments, "positions": positions}, x=x, **kernels)


def window(size):
    return lambda batch: masks.sliding_window_overlay(size)


def attention_variants():
    rows = [[4, 9], [13]]

    def common(embed, heads, kv_heads, head_dim):
        return {
            "hidden_size": embed,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "num_hidden_layers": 2,
            "attn_implementation": "eager",
        }

    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(**common(15, 3, 1, 10), rope_parameters=plain)
    layer, rotary = llama.LlamaAttention(config, 0), llama.LlamaRotaryEmbedding(config)
    shape = (15, 3, 1, 10)
    attention_variant("attention_window", layer, rotary, 15, rows, kernels_of(*shape), window(3))
    attention_variant(
        "attention_chunk", layer, rotary, 15, rows, kernels_of(*shape), lambda batch: chunks(5, batch)
    )
    attention_variant("attention_without_positions", layer, None, 15, rows, kernels_of(*shape))

    config = Gemma2Config(
        **common(18, 6, 2, 6),
        query_pre_attn_scalar=9,
        attn_logit_softcapping=1.5,
        sliding_window=4,
        rope_parameters=plain,
    )
    attention_variant(
        "attention_soft_cap",
        gemma2.Gemma2Attention(config, 0),
        gemma2.Gemma2RotaryEmbedding(config),
        18,
        rows,
        kernels_of(18, 6, 2, 6),
        window(4),
    )

    config = GptOssConfig(
        **common(15, 3, 1, 10),
        attention_bias=True,
        max_position_embeddings=64,
        sliding_window=5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    )
    kernels = kernels_of(15, 3, 1, 10, biases=True) | {"sinks": leaf(3)}
    attention_variant(
        "attention_sinks",
        gpt_oss.GptOssAttention(config, 0),
        gpt_oss.GptOssRotaryEmbedding(config),
        15,
        rows,
        kernels,
        window(5),
    )

    config = Qwen3Config(**common(12, 4, 4, 6), rope_parameters=plain)
    kernels = kernels_of(12, 4, 4, 6) | {"query_norm": leaf(6), "key_norm": leaf(6)}
    attention_variant(
        "attention_norms_of_heads",
        qwen3.Qwen3Attention(config, 0),
        qwen3.Qwen3RotaryEmbedding(config),
        12,
        rows,
        kernels,
    )

    config = Gemma3TextConfig(**common(12, 4, 2, 6), query_pre_attn_scalar=5)
    around_zero = gemma3.Gemma3RotaryEmbedding(config)
    kernels = kernels_of(12, 4, 2, 6) | {"query_norm": leaf(6), "key_norm": leaf(6)}
    attention_variant(
        "attention_norms_around_zero",
        gemma3.Gemma3Attention(config, 0),
        lambda x, positions: around_zero(x, positions, "sliding_attention"),
        12,
        rows,
        kernels,
        window(20),
    )

    config = Olmo3Config(**common(18, 6, 2, 6), rope_parameters={"sliding_attention": plain})
    all_heads = olmo3.Olmo3RotaryEmbedding(config)
    kernels = kernels_of(18, 6, 2, 6) | {"query_norm": leaf(6, 6), "key_norm": leaf(2, 6)}
    attention_variant(
        "attention_norms_of_all_heads",
        olmo3.Olmo3Attention(config, 0),
        lambda x, positions: all_heads(x, positions, "sliding_attention"),
        18,
        rows,
        kernels,
    )


def shared_keys_and_values():
    """A layer whose values are its keys, and a layer that shares them."""
    config = gemma4_config()
    segments, positions = packed([4, 9], [13])
    first, second = leaf(2, 13, 14), leaf(2, 13, 14)
    angles = gemma4.Gemma4TextRotaryEmbedding(config)(first, positions, "full_attention")
    kernels = kernels_of(14, 6, 2, 16, value=False) | {"query_norm": leaf(16), "key_norm": leaf(16)}
    others = kernels_of(14, 6, 2, 16, keys=False) | {"query_norm": leaf(16)}
    shared = KVSharingDict()
    outputs = []
    for index, x, weights in [(1, first, kernels), (3, second, others)]:
        arguments = {
            "hidden_states": x,
            "position_embeddings": angles,
            "attention_mask": mask(segments),
            "shared_kv_states": shared,
        }
        layer = gemma4.Gemma4TextAttention(config, index)
        outputs.append(torch.func.functional_call(layer, weights_of(weights), (), arguments)[0])
    others = {f"second_{name}": kernel for name, kernel in others.items()}
    integers = {"segments": segments, "positions": positions}
    record("attention_shared", outputs[0] + outputs[1], integers, x=first, second_x=second, **kernels, **others)


rms_norm()
rotary()
attention("attention_six_on_two", 18, 6, 2, 6, [[4, 7], [11]])
attention("attention_three_on_one", 15, 3, 1, 10, [[2, 1, 4]])
attention("attention_single_token", 8, 2, 2, 4, [[1]])
mlp()
embedding()
cross_entropy()
norms()
activations()
mlps_with_biases()
scaled_rotaries()
positions()
attention_variants()
shared_keys_and_values()
path = pathlib.Path(__file__).with_name("modules.safetensors")
save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)
