"""Writes *.safetensors: models whose adapted weights are quantized, with the adapters of ../adapters (QLoRA).

Needs jax flax qwix==0.1.8 torch==2.15.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0. Codes are computed in float32
by the definition, and the script asserts that Qwix finds the same ones, except at ties. Everything else is computed in float64.
"""

import pathlib

import numpy
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qwix._src.core import numerics, qarray

# Model, adapters, type, tile.
CASES = [
    ("llama_six_on_two", "lora", "int8", None),
    ("llama_six_on_two", "lora", "int4", 2),
    ("llama_six_on_two", "lora", "nf4", None),
    ("llama_six_on_two", "lora", "nf4", 2),
    ("llama_six_on_two", "dora", "int8", 2),
    ("llama_six_on_two", "dora", "nf4", 2),
    ("llama_six_on_two", "dora", "nf4", None),
    ("llama_six_on_two", "dora", "int4", 2),
    ("qwen3_untied", "lora", "int8", 2),
    ("qwen3_untied", "dora", "nf4", None),
    ("qwen3_untied", "dora", "int4", 2),
    ("gemma2_odd_untied", "lora", "int4", None),
    ("gemma2_odd_untied", "dora", "nf4", 2),
    ("gemma2_odd_untied", "dora", "int8", None),
]
BOUNDS = {"int8": 127.5, "int4": 7.5, "nf4": 1.0}


def dequantized(weight, inputs, qtype, tile):
    """Quantizes `[outputs, inputs]`, whose inputs are split into axes of these sizes, and back."""
    outputs = weight.shape[0]
    kernel = weight.T.astype(numpy.float32).reshape(*inputs, outputs)
    axes = list(range(len(inputs) - 1))
    tiles = kernel.shape[-2] // tile if tile else 1
    cut = kernel.reshape(*inputs[:-1], tiles, -1, outputs)
    largest = numpy.abs(cut).max(axis=(*axes, len(inputs)), keepdims=True)
    scale = largest / numpy.float32(BOUNDS[qtype])
    # The largest numbers are ties, so that the type of the quotient matters.
    scaled = cut / scale
    assert scaled.dtype == numpy.float32
    if qtype == "nf4":
        numbers = numpy.asarray(numerics.get_nf4_buckets())
        codes = numpy.abs(scaled[..., None] - numbers).argmin(-1)
        values = numbers[codes]
    else:
        bits = int(qtype[3:])
        codes = values = numpy.clip(numpy.rint(scaled), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    how = qarray.HowToQuantize(
        qtype=qtype, channelwise_axes=[len(inputs)], tiled_axes={len(inputs) - 1: tile} if tile else {}
    )
    theirs = numpy.asarray(qarray.quantize(kernel, how).qvalue).astype(numpy.float64)
    # The largest numbers of tiles lie half a step beyond the last code, where XLA's quotient decides.
    is_tie = numpy.abs(numpy.abs(scaled) - BOUNDS[qtype]) < 1e-4
    assert ((theirs == codes.reshape(kernel.shape)) | is_tie.reshape(kernel.shape)).all(), "Qwix finds other codes"
    return (values.astype(numpy.float64) * scale.astype(numpy.float64)).reshape(-1, outputs).T


here = pathlib.Path(__file__).parent
for name, variant, qtype, tile in CASES:
    directory = here.parent / "families" / name
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, here.parent / "adapters" / name / variant, is_trainable=True).double()
    tensors = {}
    config = base.config
    for key, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        weight = module.base_layer.weight
        width = config.head_dim if key.endswith("o_proj") else weight.shape[1]
        inputs = (weight.shape[1] // width, width) if key.endswith("o_proj") else (width,)
        with torch.no_grad():
            weight.copy_(torch.tensor(dequantized(weight.detach().numpy(), inputs, qtype, tile)))
        tensors[key.removeprefix("base_model.model.") + ".weight"] = weight.detach()
    tokens = load_file(directory / "golden.safetensors")["tokens"].long()
    golden = load_file(here.parent / "adapters" / name / variant / "golden.safetensors")
    logits = model(tokens, use_cache=False).logits
    tensors["logits"] = logits.detach()
    if "targets" in golden:
        targets = golden["targets"].long()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        tensors["targets"], tensors["loss"] = golden["targets"], loss.detach()
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                tensors["gradient." + key.replace(".default", "")] = parameter.grad
    narrow = lambda value: value.float() if value.is_floating_point() else value
    tensors = {key: narrow(value).clone().contiguous() for key, value in tensors.items()}
    save_file(tensors, here / f"{name}_{variant}_{qtype}_{tile or 'channel'}.safetensors")
