"""Writes adapter_dropout.safetensors: linear maps with adapters whose inputs are dropped, computed by PEFT.

Needs jax torch==2.15.0 peft==0.21.2 safetensors==0.8.0. Masks are drawn as the program draws them, from a key by ThreeFry, and put
in the place of PEFT's dropout module. `statistics` is PEFT's own dropout: means and deviations of outputs over many
draws.
"""

import pathlib

import jax
import numpy
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.numpy import save_file

jax.config.update("jax_enable_x64", True)
BATCH, POSITION, EMBED, MLP, RANK, ALPHA, RATE, KEY = 2, 7, 5, 4, 3, 6, 0.4, 11
DRAWS = 40000


def mask(shape):
    state = jax.numpy.array([KEY, 0], jax.numpy.uint64)
    algorithm = jax.lax.RandomAlgorithm.RNG_THREE_FRY
    _, bits = jax.lax.rng_bit_generator(state, shape, dtype=jax.numpy.uint32, algorithm=algorithm)
    uniform = (numpy.asarray(bits) >> 8).astype(numpy.float32) * numpy.float32(2.0**-24)
    return torch.tensor(uniform >= RATE)


class Given(torch.nn.Module):
    def forward(self, x):
        return x * mask(tuple(x.shape)) / (1 - RATE)


def adapted(use_dora):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(EMBED, MLP, bias=False))
    options = dict(r=RANK, lora_alpha=ALPHA, lora_dropout=RATE, use_dora=use_dora, target_modules=["0"])
    model = inject_adapter_in_model(LoraConfig(**options), model).double().train()
    layer = model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(torch.randn(MLP, RANK))
        if use_dora:
            layer.lora_magnitude_vector["default"].weight.mul_(1 + 0.3 * torch.randn(MLP))
    return layer


tensors = {}
for name, use_dora in [("lora", False), ("dora", True)]:
    layer = adapted(use_dora)
    weights = {
        "weight": layer.base_layer.weight,
        "a": layer.lora_A["default"].weight,
        "b": layer.lora_B["default"].weight,
    }
    if use_dora:
        weights["magnitude"] = layer.lora_magnitude_vector["default"].weight
    for parameter in weights.values():
        parameter.requires_grad_()
    x = torch.randn(BATCH, POSITION, EMBED, dtype=torch.float64)
    one = x[:1, :1].clone()
    own = layer.lora_dropout["default"]
    draws = layer(one.expand(DRAWS, 1, EMBED))[:, 0].detach()
    tensors[f"{name}.statistics"] = torch.stack([draws.mean(0), draws.std(0)])
    layer.lora_dropout["default"] = Given()
    x.requires_grad_()
    y = layer(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    values = {"x": x, "y": y, "cotangent": cotangent, "gradient.x": x.grad}
    for key, parameter in weights.items():
        turn = (lambda value: value.T) if parameter.dim() == 2 else (lambda value: value)
        values[key], gradient = turn(parameter), parameter.grad
        # PEFT computes the norm from the weight itself, whose gradient the program leaves out with that of the norm.
        if key != "weight":
            values[f"gradient.{key}"] = turn(gradient)
    tensors |= {f"{name}.{key}": value for key, value in values.items()}

tensors = {key: value.detach().float().contiguous().numpy().copy() for key, value in tensors.items()}
save_file(tensors, pathlib.Path(__file__).parent / "adapter_dropout.safetensors")
