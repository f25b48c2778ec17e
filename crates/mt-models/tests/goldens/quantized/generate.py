"""Writes the directories beside this script: quantized models and lists of codes as they are published, with the numbers
to which the libraries that define the formats decode them.

    pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 safetensors==0.8.0 numpy==2.4.6
    python generate.py

README.md lists the files.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "families"))

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from generate import EAGER, forward, heads, make, rope, sizes
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    FineGrainedFP8Config,
    GptOssConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

FP8 = torch.float8_e4m3fn


def write(path, tensors):
    save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, path)


def cdiv(size, block):
    return -(-size // block)


# FP8


def fp8_decoded(codes, scales, block):
    """compressed-tensors, which pads partial blocks. Without any, transformers decodes to the same numbers."""
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=block)
    numbers = scales.float() if scales.dtype != torch.uint8 else (scales.float() - 127).exp2()
    dense = dequantize(codes, numbers, args=args)
    if codes.shape[0] % block[0] == 0 and codes.shape[1] % block[1] == 0:
        other = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
        assert torch.equal(dense.nan_to_num(1e3), other.nan_to_num(1e3))
    return dense


def fp8_encoded(weight, block, dtype):
    rows, columns = weight.shape
    scales = torch.empty(cdiv(rows, block[0]), cdiv(columns, block[1]))
    codes = torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scales[row, column] = (weight[place].abs().max() / 448).to(dtype)
            codes[place] = weight[place] / scales[row, column]
    return codes.clamp(-448, 448).to(FP8), scales.to(dtype)


def fp8(name, weight, block, dtype):
    codes, scales = fp8_encoded(weight, block, dtype)
    return {name: codes, f"{name}_scale_inv": scales}, fp8_decoded(codes, scales, block)


def fp4(name, weight):
    """Random codes, with exponents that give a deviation of about 0.17."""
    rows, columns = weight.shape
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
    scales = torch.randint(121, 125, (rows, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    dense = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
    return {name: codes, name.replace(".weight", ".scale"): scales}, dense


# MXFP4


def mxfp4(name, weight):
    """Random codes, with exponents that give a deviation of about 0.17, for `[experts, inputs, outputs]`."""
    experts, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert dense.shape == weight.shape
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, dense


# Integers of 4 bits


def weights_args(group):
    return dict(
        actorder=None, block_structure=None, dynamic=False, group_size=group, num_bits=4, observer="minmax",
        observer_kwargs={}, strategy="group", symmetric=True, type="int",
    )


def int4(name, weight, group, dtype, shape_type=torch.int32):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights_args(group)))
    scales = (weight.unflatten(1, (-1, group)).abs().amax(-1) / 7).to(dtype)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress({"weight": weight.to(dtype), "weight_scale": scales}, scheme)
    packed["weight_shape"] = packed["weight_shape"].to(shape_type)
    dense = compressor.decompress(dict(packed), scheme)["weight"]
    assert dense.dtype == dtype
    stem = name.removesuffix("weight")
    kept = {key: packed[key] for key in ["weight_packed", "weight_scale", "weight_shape"]}
    return {stem + key: value for key, value in kept.items()}, dense.float()


# Lists of codes


def write_codes(name, quantization, tensors, dense):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(quantization_config=quantization), indent=2) + "\n")
    write(folder / "model.safetensors", tensors)
    write(folder / "dense.safetensors", dense)
    print(name, sum(file.stat().st_size for file in folder.iterdir()) // 1000, "kB")


def codes():
    torch.manual_seed(0)
    block = [2, 32]
    all_codes = torch.arange(256, dtype=torch.uint8).view(8, 32).view(FP8)
    exponents = torch.arange(256, dtype=torch.uint8).view(256, 1)
    tensors, dense = {}, {}

    def add(name, codes, scales):
        tensors.update({name: codes, f"{name}_scale_inv": scales})
        dense[name] = fp8_decoded(codes, scales, block)

    for name, dtype in dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16).items():
        add(f"{name}.weight", all_codes, torch.rand(4, 1).to(dtype))
    add("exponents.weight", torch.randint(0, 256, (512, 32), dtype=torch.uint8).view(FP8), exponents)
    add("e8m0.weight", torch.randint(0, 256, (512, 32), dtype=torch.uint8).view(FP8), exponents.view(torch.float8_e8m0fnu))
    add("partial.weight", torch.randint(0, 256, (7, 45), dtype=torch.uint8).view(FP8), torch.rand(4, 2))
    quantization = dict(quant_method="fp8", weight_block_size=block, scale_fmt="ue8m0", activation_scheme="dynamic")
    write_codes("codes_fp8", quantization, tensors, dense)

    whole = torch.randint(0, 256, (6, 10), dtype=torch.uint8).view(FP8)
    tensors, dense = {}, {}
    for name, scale in dict(scalar=torch.tensor(0.3), vector=torch.tensor([0.7]), matrix=torch.tensor([[1.3]])).items():
        tensors |= {f"{name}.weight": whole, f"{name}.weight_scale_inv": scale}
        dense[f"{name}.weight"] = Fp8Dequantize(None)._dequantize_one(whole, scale.view(1, 1), torch.float32)
    tensors["scalar.activation_scale"] = torch.tensor(2.0)
    quantization = dict(quant_method="fp8", weight_block_size=None, activation_scheme="static")
    write_codes("codes_fp8_whole", quantization, tensors, dense)

    pairs = torch.tensor([2 * half + 16 * (2 * half + 1) for half in range(8)], dtype=torch.uint8)
    every = torch.cat([pairs, pairs.flip(0)]).expand(256, 16)
    blocks = torch.stack([every, torch.randint(0, 256, (256, 16), dtype=torch.uint8)])[None]
    scales = torch.stack([exponents[:, 0], torch.randint(0, 256, (256,), dtype=torch.uint8)])[None]
    tensors = {"experts.every_blocks": blocks, "experts.every_scales": scales}
    few, exact = mxfp4("experts.few", torch.empty(3, 64, 5))
    dense = {"experts.every": convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), "experts.few": exact}
    write_codes("codes_mxfp4", dict(quant_method="mxfp4"), tensors | few, dense)

    tensors, dense = {}, {}
    for name, dtype in dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16).items():
        quantized, exact = int4(f"{name}.weight", torch.randn(16, 36), 12, dtype, torch.int64)
        # Words with all codes.
        quantized[f"{name}.weight_packed"][0, :2] = torch.tensor([0x76543210, 0xFEDCBA98 - (1 << 32)], dtype=torch.int32)
        args = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights_args(12)))
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        own = {key.removeprefix(f"{name}."): value for key, value in quantized.items()}
        tensors |= quantized
        dense[f"{name}.weight"] = compressor.decompress(own, args)["weight"].float()
    write_codes("codes_int4", compressed(12, []), tensors, dense)


def codes_of_4_bits():
    """All codes with all exponents, and scales of other forms."""
    torch.manual_seed(1)
    exponents = torch.arange(256, dtype=torch.uint8).view(256, 1)
    every = torch.arange(16, dtype=torch.uint8) * 16 + torch.arange(16, dtype=torch.uint8).flip(0)
    packed = torch.cat([every.expand(256, 16), torch.randint(0, 256, (256, 16), dtype=torch.uint8)], 1).view(torch.int8)
    both = torch.cat([exponents, exponents.flip(0)], 1)
    tensors, dense = {}, {}
    decode = lambda codes, scales: Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
    for name, scales in dict(
        e8m0=both.view(torch.float8_e8m0fnu), bytes=both[-9:], f32=torch.rand(7, 2), bf16=torch.rand(5, 2).bfloat16(),
    ).items():
        own = packed[: scales.shape[0]].clone()
        tensors |= {f"{name}.weight": own, f"{name}.scale": scales}
        dense[f"{name}.weight"] = decode(own, scales)
    # The other name of scales, and a matrix for each expert.
    several, scales = torch.randint(-128, 128, (2, 5, 48), dtype=torch.int8), torch.rand(2, 5, 3)
    tensors |= {"several.weight": several, "several.weight_scale_inv": scales}
    dense["several.weight"] = torch.stack([decode(several[index], scales[index]) for index in range(2)])
    write_codes("codes_fp4", dict(quant_method="fp8", scale_fmt="ue8m0", expert_dtype="fp4"), tensors, dense)


# Models


def compressed(group, ignore):
    return dict(
        config_groups=dict(
            group_0=dict(
                input_activations=None, output_activations=None, targets=["Linear"], weights=weights_args(group)
            )
        ),
        format="pack-quantized", ignore=ignore, kv_cache_scheme=None, quant_method="compressed-tensors",
        quantization_status="compressed",
    )


def deepseek3_fp8():
    """Blocks of 128 x 128 of which the last ones are narrower, and the types of DeepSeek-V3's files."""
    config = DeepseekV3Config(
        **sizes(80, 136, 24, 2), kv_lora_rank=10, qk_nope_head_dim=44, qk_rope_head_dim=4, v_head_dim=8,
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=14, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=8, n_group=2, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=2.5, tie_word_embeddings=False, rope_parameters=rope(10000.0),
    )
    quantization = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
    is_quantized = lambda name: name.endswith("_proj.weight") or name.endswith("_mqa.weight")
    return config, quantization, is_quantized, lambda name, weight: fp8(name, weight, [128, 128], torch.float32), None


def qwen3_moe_fp8():
    """Whole blocks, scales in bf16, and a list of modules, as in Qwen's files."""
    config = Qwen3MoeConfig(
        **sizes(80, 24, 28, 2), **heads(4, 2, 8), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, tie_word_embeddings=False, rope_parameters=rope(1000000.0),
    )
    dense = ["lm_head"] + [
        f"model.layers.{layer}.{name}" for layer in range(2)
        for name in ["input_layernorm", "mlp.gate", "post_attention_layernorm"]
    ]
    quantization = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[8, 8],
        modules_to_not_convert=dense,
    )
    is_quantized = lambda name: name.endswith("_proj.weight")
    loading = FineGrainedFP8Config(weight_block_size=[8, 8], modules_to_not_convert=dense, dequantize=True)
    return config, quantization, is_quantized, lambda name, weight: fp8(name, weight, [8, 8], torch.bfloat16), loading


def gpt_oss_mxfp4():
    config = GptOssConfig(
        **sizes(80, 64, 32, 2), **heads(4, 2, 8), num_local_experts=3, num_experts_per_tok=2, sliding_window=6,
        swiglu_limit=2.0, tie_word_embeddings=False, rope_parameters=rope(10000.0),
    )
    quantization = dict(
        modules_to_not_convert=[
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        quant_method="mxfp4",
    )
    is_quantized = lambda name: name.endswith("_proj") and "experts" in name
    return config, quantization, is_quantized, mxfp4, Mxfp4Config(dequantize=True)


def kimi_k2_int4():
    config = DeepseekV3Config(
        **sizes(80, 64, 40, 2), kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8,
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=14, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=2.8, tie_word_embeddings=False, rope_parameters=rope(50000.0),
    )
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    quantization = compressed(32, ignore)
    is_quantized = lambda name: ".experts." in name
    encode = lambda name, weight: int4(name, weight, 32, torch.bfloat16)
    return config, quantization, is_quantized, encode, CompressedTensorsConfig(**quantization, dequantize=True)


def deepseek4_fp4():
    """Names and settings of DeepSeek-V4's own files: experts of 4 bits, others of 8 in smaller blocks."""
    sparse, window = "compressed_sparse_attention", "sliding_attention"
    yarn = dict(beta_fast=32, beta_slow=1, factor=4, original_max_position_embeddings=16)
    config = DeepseekV4Config(
        **sizes(83, 64, 32, 2), **heads(3, 1, 32), qk_rope_head_dim=6, partial_rotary_factor=6 / 32, q_lora_rank=32,
        o_groups=3, o_lora_rank=32, layer_types=[sparse, window], num_hash_layers=1, hc_mult=3, hc_sinkhorn_iters=4,
        sliding_window=5, n_routed_experts=3, num_experts_per_tok=2, swiglu_limit=2.0, index_n_heads=5,
        index_head_dim=32, index_topk=2, rope_theta=10000.0, compress_rope_theta=300.0,
        rope_parameters=rope(10000.0, "yarn", **yarn),
    )
    quantization = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[32, 32]
    )
    matrices = ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"]
    is_quantized = lambda name: name.split(".")[-2] in matrices and ".compressor." not in name

    def encode(name, weight):
        if ".experts." in name:
            return fp4(name, weight)
        exponents = (weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).abs().amax((1, 3)) / 448).log2().ceil()
        scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        codes = (weight / exponents.exp2().repeat_interleave(32, 0).repeat_interleave(32, 1)).to(FP8)
        dense = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
        return {name: codes, name.replace(".weight", ".scale"): scales}, dense

    def rename(name):
        """transformers' names, as it writes them, to those of the release."""
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        return name.replace(".attn.norm.", ".attn.kv_norm.")

    def respell(written):
        for key in ["layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"]:
            written.pop(key)
        written["torch_dtype"] = written.pop("dtype")
        return written | dict(
            compress_ratios=[4, 0, 0], num_hash_layers=1, rope_scaling=yarn | dict(type="yarn"), expert_dtype="fp4",
            rope_theta=10000, topk_method="noaux_tc",
        )

    loading = FineGrainedFP8Config(weight_block_size=[32, 32], scale_fmt="ue8m0", dequantize=True)
    return config, quantization, is_quantized, encode, loading, rename, respell


def widened(value):
    return value.float() if value.is_floating_point() else value


def unchanged(value):
    return value


def write_model(name, config, quantization, is_quantized, encode, loading, rename=unchanged, respell=unchanged):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model, tokens = make(name, config)
    with tempfile.TemporaryDirectory() as plain:
        # What is not quantized is published in bf16.
        model.to(torch.bfloat16).save_pretrained(plain)
        tensors = load_file(f"{plain}/model.safetensors")
        stored, dense = {}, {}
        for key, value in tensors.items():
            if is_quantized(key):
                quantized, dense[key] = encode(rename(key), value.float())
                stored |= quantized
            else:
                stored[rename(key)] = value
        assert dense
        shutil.copytree(plain, folder)
        write(folder / "model.safetensors", stored)
        write(folder / "dense.safetensors", {rename(key): value for key, value in dense.items()})
        written = json.loads((folder / "config.json").read_text()) | dict(quantization_config=quantization)
        assert written["dtype"] == "bfloat16"
        # transformers derives it from other keys; published files do not have it.
        written.pop("qk_head_dim", None)
        written = respell(written)
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        write(f"{plain}/model.safetensors", {key: widened(value) for key, value in (tensors | dense).items()})
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **EAGER).eval()
        rounded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, **EAGER).state_dict()
    with torch.no_grad():
        logits, hidden = forward(model, tokens)
        names = {f"hidden_{index}": state for index, state in enumerate(hidden)}
        write(folder / "golden.safetensors", {"tokens": tokens.int(), "logits": logits} | names)
        if loading is not None:
            # transformers reads the quantized files, in the type in which it also decodes scales in bf16.
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=loading, **EAGER
            ).state_dict()
            assert loaded.keys() == rounded.keys()
            for key, value in loaded.items():
                assert torch.equal(value, rounded[key]), f"{name}: transformers decodes {key} to other numbers"
    if name.startswith("kimi"):
        # transformers does not know the name that the files have.
        written["model_type"] = "kimi_k2"
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: deviation {logits.std():.2f}, {size / 1000:.0f} kB")


def main():
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    codes()
    codes_of_4_bits()
    for case in [deepseek3_fp8, qwen3_moe_fp8, gpt_oss_mxfp4, kimi_k2_int4, deepseek4_fp4]:
        write_model(case.__name__, *case())


if __name__ == "__main__":
    main()
