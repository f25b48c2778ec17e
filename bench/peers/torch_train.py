"""Trains the model with PyTorch, eager or compiled. Usage: torch_train.py JOB, see job.py."""

import contextlib
import os

import job

asked = job.read()
if asked["cache"]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = asked["cache"]

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file
from torch import nn

import model

variant = asked["variant"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        width = model.HEADS * model.HEAD_DIM
        self.q_proj = nn.Linear(model.EMBED, width, bias=False)
        self.k_proj = nn.Linear(model.EMBED, width, bias=False)
        self.v_proj = nn.Linear(model.EMBED, width, bias=False)
        self.o_proj = nn.Linear(width, model.EMBED, bias=False)

    def forward(self, x, sin, cos):
        def heads(y):
            return y.view(*y.shape[:2], model.HEADS, model.HEAD_DIM).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), sin, cos)
        key = rotate(heads(self.k_proj(x)), sin, cos)
        value = heads(self.v_proj(x))
        if variant["attention"] == "library":
            context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = (query @ key.transpose(-1, -2)).float() * model.HEAD_DIM**-0.5
            context = scores.masked_fill(~mask, -1e30).softmax(-1).to(value.dtype) @ value
        return self.o_proj(context.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(model.EMBED, model.MLP, bias=False)
        self.up_proj = nn.Linear(model.EMBED, model.MLP, bias=False)
        self.down_proj = nn.Linear(model.MLP, model.EMBED, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.EMBED, eps=model.EPSILON)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(model.EMBED, eps=model.EPSILON)
        self.mlp = Mlp()

    def forward(self, x, sin, cos):
        x = x + self.self_attn(self.input_layernorm(x), sin, cos)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(model.VOCAB, model.EMBED)
        self.layers = nn.ModuleList(Layer() for _ in range(model.LAYERS))
        self.norm = nn.RMSNorm(model.EMBED, eps=model.EPSILON)
        exponents = torch.arange(model.HEAD_DIM // 2) / (model.HEAD_DIM // 2)
        angles = torch.arange(model.LENGTH)[:, None] * model.ROPE_BASE**-exponents
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("cos", angles.cos(), persistent=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        if asked["dtype"] == "bfloat16" and variant["stream"] == "bfloat16":
            x = x.bfloat16()
        for layer in self.layers:
            x = layer(x, self.sin, self.cos)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(model.EMBED, model.VOCAB, bias=False)

    def forward(self, inputs, targets):
        logits = self.lm_head(self.model(inputs))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotate(x, sin, cos):
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def main():
    # Weights are loaded or drawn below, so modules need not initialize theirs.
    nn.Linear.reset_parameters = nn.Embedding.reset_parameters = lambda module: None
    network = Model()
    if asked["weights"]:
        network.load_state_dict(load_file(asked["weights"]))
    else:
        for parameter in network.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=model.LEARNING_RATE,
        betas=(model.BETA1, model.BETA2),
        eps=model.ADAM_EPSILON,
        weight_decay=model.WEIGHT_DECAY,
        fused=True,
    )
    compiled = network
    if asked["compiled"]:
        mode = variant["mode"]
        compiled = torch.compile(network, dynamic=False, mode=None if mode == "default" else mode)
    rows = torch.from_numpy(np.load(asked["tokens"])).long().view(-1, model.BATCH, model.LENGTH + 1)

    def precision():
        if asked["dtype"] == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def advance(number):
        batch = rows[number % len(rows)]
        with precision():
            value = compiled(batch[:, :-1], batch[:, 1:])
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), model.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    job.steps(asked, advance)


main()
