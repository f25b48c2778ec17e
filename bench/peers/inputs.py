"""Writes the inputs of all contestants: random weights as a published model and as GGUF, and rows of random tokens.

Usage: inputs.py DIRECTORY. Each row of tokens is a line of a text file, with one word per token for a tokenizer that
knows each word, and a row of tokens.npy. It has one token more than a sequence, so that a document fills one sequence.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

import model

ROWS = 256


def weights():
    generator = np.random.default_rng(0)
    for name, shape in model.parameters():
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            yield name, generator.standard_normal(shape, np.float32) * np.float32(0.02)


def write_published(directory, arrays):
    directory.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "head_dim": model.HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": model.EMBED,
        "intermediate_size": model.MLP,
        "max_position_embeddings": 2048,
        "num_attention_heads": model.HEADS,
        "num_hidden_layers": model.LAYERS,
        "num_key_value_heads": model.HEADS,
        "rms_norm_eps": model.EPSILON,
        "rope_theta": model.ROPE_BASE,
        "tie_word_embeddings": False,
        "vocab_size": model.VOCAB,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{token}": token for token in range(model.VOCAB)},
            "unk_token": "w0",
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})


def paired(matrix):
    """Reorders the rows of a matrix for rotary embedding of neighbors, as in GGUF, instead of halves."""
    halves = matrix.reshape(model.HEADS, 2, model.HEAD_DIM // 2, model.EMBED)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


def write_gguf(path, arrays, kind):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(kind)
    writer.add_context_length(2048)
    writer.add_embedding_length(model.EMBED)
    writer.add_block_count(model.LAYERS)
    writer.add_feed_forward_length(model.MLP)
    writer.add_head_count(model.HEADS)
    writer.add_head_count_kv(model.HEADS)
    writer.add_rope_dimension_count(model.HEAD_DIM)
    writer.add_rope_freq_base(model.ROPE_BASE)
    writer.add_layer_norm_rms_eps(model.EPSILON)
    writer.add_vocab_size(model.VOCAB)
    # The library needs a vocabulary, although prompts are passed as numbers.
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"w{token}" for token in range(model.VOCAB)])
    writer.add_token_scores([0.0] * model.VOCAB)
    writer.add_token_types([gguf.TokenType.NORMAL] * model.VOCAB)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.LAYERS)
    for name, array in arrays.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = paired(array)
        # Vectors stay in float32, as in the library's own converter.
        narrow = kind == gguf.LlamaFileType.MOSTLY_BF16 and array.ndim == 2
        kept = gguf.GGMLQuantizationType.BF16 if narrow else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(array, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    directory = Path(sys.argv[1])
    arrays = dict(weights())
    write_published(directory / "model", arrays)
    write_gguf(directory / "float32.gguf", arrays, gguf.LlamaFileType.ALL_F32)
    write_gguf(directory / "bfloat16.gguf", arrays, gguf.LlamaFileType.MOSTLY_BF16)
    # Token frequencies fall like those of words, so that the model can learn them and losses decrease.
    frequencies = 1 / np.arange(1, model.VOCAB + 1)
    shape = (ROWS, model.LENGTH + 1)
    tokens = np.random.default_rng(1).choice(model.VOCAB, shape, p=frequencies / frequencies.sum())
    tokens = tokens.astype(np.int32)
    np.save(directory / "tokens.npy", tokens)
    lines = (" ".join(f"w{token}" for token in row) for row in tokens)
    (directory / "rows.txt").write_text("\n".join(lines) + "\n")


main()
