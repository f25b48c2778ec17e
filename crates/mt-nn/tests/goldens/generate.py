"""Writes modules.safetensors: layers of Hugging Face transformers in f32, with gradients from PyTorch.

Needs torch, transformers and safetensors. Each layer has its arguments under its name, what comes out as `y`, a
cotangent, and under `gradient.` the gradients of the sum of the products of both. Weights are in this program's
layout: [embed, heads, head_dim] instead of [heads * head_dim, embed].
"""

import pathlib

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

torch.manual_seed(7)
tensors = {}


def record(name, y, integers, **arguments):
    """Differentiates y by the arguments, tensors that require gradients, and keeps everything."""
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
    """Segments and positions of rows of documents with these lengths."""
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


rms_norm()
rotary()
attention("attention_six_on_two", 18, 6, 2, 6, [[4, 7], [11]])
attention("attention_three_on_one", 15, 3, 1, 10, [[2, 1, 4]])
attention("attention_single_token", 8, 2, 2, 4, [[1]])
mlp()
embedding()
cross_entropy()
path = pathlib.Path(__file__).with_name("modules.safetensors")
save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)
