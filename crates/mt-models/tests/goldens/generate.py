"""Writes llama_*.safetensors: tiny random LlamaForCausalLM in f32: weights, logits, loss and gradients.

Needs torch, transformers and safetensors. Weights and gradients have Hugging Face's names and layouts.
"""

import pathlib

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CASES = {
    # Several query heads per key-value head; all heads together are wider than the residual stream.
    "six_on_two": dict(
        hidden_size=18, num_attention_heads=6, num_key_value_heads=2, head_dim=6, intermediate_size=38,
        num_hidden_layers=2, vocab_size=61, tie_word_embeddings=False, rows=2, length=9,
    ),
    "three_on_one_tied": dict(
        hidden_size=21, num_attention_heads=3, num_key_value_heads=1, head_dim=10, intermediate_size=31,
        num_hidden_layers=3, vocab_size=53, tie_word_embeddings=True, rows=1, length=17,
    ),
    "one_layer_one_token": dict(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4, intermediate_size=24,
        num_hidden_layers=1, vocab_size=29, tie_word_embeddings=False, rows=1, length=1,
    ),
    "one_layer_tied": dict(
        hidden_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=20,
        num_hidden_layers=1, vocab_size=31, tie_word_embeddings=True, rows=3, length=5,
    ),
}

for index, (name, case) in enumerate(CASES.items()):
    torch.manual_seed(index)
    rows, length = case.pop("rows"), case.pop("length")
    config = LlamaConfig(
        **case, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64, attn_implementation="eager"
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1.0 + 0.3 * noise if key.endswith("norm.weight") else noise * parameter.shape[-1] ** -0.5)
    tokens, targets = torch.randint(0, config.vocab_size, (2, rows, length))
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(rows * length, -1), targets.reshape(-1))
    loss.backward()
    tensors = {"tokens": tokens.int(), "targets": targets.int(), "logits": logits, "loss": loss}
    for key, parameter in model.named_parameters():
        tensors[f"weight.{key}"] = parameter
        tensors[f"gradient.{key}"] = parameter.grad
    path = pathlib.Path(__file__).with_name(f"llama_{name}.safetensors")
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, path)
