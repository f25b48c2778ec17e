"""Published models of random weights for GGUF, and checks of what was made of them.

Usage: gguf_files.py write DIRECTORY
       gguf_files.py check DIRECTORY

`write` writes a Hugging Face directory for each family. `check` reads the files `NAME.DTYPE.gguf` beside them with the
packages gguf, transformers and llama-cpp-python, and prints one JSON object: the problems by file, and how many checks
of each kind were made.
"""

import json
import os
import pathlib
import sys

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

TEXT = """All happy families are alike; each unhappy family is unhappy in its own way. It's 1234567 o'clock.
The river runs to the sea, and the sea is never full. Where does the river begin?  Two  spaces, and a tab:\there.
Question: which animal barks? Answer: a dog. Question: which animal sings? Answer: a bird. WE'LL SEE, WE'VE SEEN.
The answer is a number between one and ten: one, two, three, four, five, six, seven, eight, nine, ten.
Der Bär läuft über die Brücke; 東京は日本の首都です。 Café, naïve, façade!
"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def byte_level(directory, pattern, ignore_merges):
    """A byte-level tokenizer with the split pattern of a family."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"], show_progress=False,
    )
    made.train_from_iterator(TEXT.splitlines(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>")
    fast.save_pretrained(directory)
    return len(fast)


def sentence_piece(directory, prefix):
    """A SentencePiece model as those of Llama 2 and Gemma."""
    text = directory / "text"
    text.write_text(TEXT * 4)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "tokenizer"), model_type="bpe", vocab_size=420,
        byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2,
    )
    text.unlink()
    (directory / "tokenizer.vocab").unlink()
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return 420


COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# Name, class, keys, tokenizer, and whether transformers reads all of the description in the file. It assumes Qwen3's heads
# of 128 dimensions, and Gemma's scale of attention for heads of 256.
MODELS = [
    ("llama", "Llama", dict(head_dim=16), ("bytes", LLAMA3, True), True),
    ("llama_scaled", "Llama", dict(head_dim=24, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
     ("bytes", LLAMA3, True), False),
    ("llama_biases", "Llama", dict(head_dim=16, attention_bias=True), ("pieces", True), False),
    ("qwen2", "Qwen2", dict(), ("bytes", QWEN2, False), True),
    ("qwen3", "Qwen3", dict(head_dim=128, tie_word_embeddings=True), ("bytes", QWEN2, False), True),
    ("gemma2", "Gemma2", dict(head_dim=256, query_pre_attn_scalar=256, sliding_window=16, tie_word_embeddings=True),
     ("pieces", False), True),
    ("gemma3", "Gemma3", dict(head_dim=256, query_pre_attn_scalar=256, sliding_window=16, num_hidden_layers=7,
                              tie_word_embeddings=True), ("pieces", False), True),
    ("mixtral", "Mixtral", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2), ("pieces", True), False),
]


def write(root):
    for name, family, keys, tokenizer, _ in MODELS:
        directory = root / name
        directory.mkdir(parents=True)
        torch.manual_seed(len(name))
        kind, *options = tokenizer
        vocabulary = byte_level(directory, *options) if kind == "bytes" else sentence_piece(directory, *options)
        config_class = getattr(transformers, f"{family}{'TextConfig' if family == 'Gemma3' else 'Config'}")
        # Some rows of the table have no token.
        config = config_class(**{**COMMON, **keys}, vocab_size=vocabulary + 12, bos_token_id=0, eos_token_id=1)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 0.0 if family.startswith("Gemma") else 1.0, 0.1)
        model.save_pretrained(directory)


def hugging_face_name(name, architecture):
    """The tensor of Hugging Face's files, by llama.cpp's own table of names."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(arch, 16)
    return next((key for key, (_, value) in table.mapping.items() if value == name and key in WANTED), None)


WANTED = set()


def expected(name, tensors, architecture, heads, kv_heads, experts):
    """The values that llama.cpp's converter writes."""
    stem, suffix = name.rsplit(".", 1)
    if stem.endswith("_exps"):
        layer = stem.split(".")[1]
        matrix = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}[stem.split(".")[2]]
        path = f"model.layers.{layer}.block_sparse_moe.experts"
        return torch.stack([tensors[f"{path}.{expert}.{matrix}.weight"] for expert in range(experts)])
    values = tensors[f"{hugging_face_name(stem, architecture)}.{suffix}"]
    if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
        number = heads if "attn_q." in name else kv_heads
        shape = values.shape
        values = values.reshape(number, 2, shape[0] // number // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return values + 1 if architecture.startswith("gemma") and stem.endswith("norm") else values


def check_tensors(path, directory, kind):
    reader = gguf.GGUFReader(path)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    architecture = reader.fields["general.architecture"].contents()
    WANTED.update(name.rsplit(".", 1)[0] for name in tensors)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    problems, num_elements = [], 0
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        wanted = expected(tensor.name, tensors, architecture, heads, kv_heads, config.get("num_local_experts"))
        wanted = wanted.float().numpy()
        num_elements += wanted.size
        is_plain = wanted.ndim == 1 or tensor.name.endswith("ffn_gate_inp.weight")
        type_of = gguf.GGMLQuantizationType
        wanted_type = {"float32": type_of.F32, "bfloat16": type_of.BF16, "q8_0": type_of.Q8_0}[kind]
        wanted_type = type_of.F32 if is_plain else wanted_type
        if list(tensor.shape) != list(reversed(wanted.shape)) or tensor.tensor_type != wanted_type:
            problems.append(f"{tensor.name}: {tensor.shape} {tensor.tensor_type}, not {wanted.shape} {wanted_type}")
            continue
        # Byte for byte what the package writes.
        encoded = gguf.quants.quantize(wanted, wanted_type)
        if np.asarray(tensor.data).tobytes() != np.asarray(encoded).tobytes():
            problems.append(f"{tensor.name}: other values")
    if num_elements != sum(value.numel() for value in tensors.values()):
        problems.append("some tensors are missing")
    return problems


def check_transformers(path, original):
    """The logits of the file in transformers, against those of the directory."""
    tokens = torch.arange(2, 42)[None]
    load = dict(dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **load)(tokens).logits
        wanted = original(tokens).logits
    error = ((made - wanted).abs().max() / wanted.std()).item()
    return [] if error < 1e-5 else [f"transformers: logits differ by {error:.2e}"]


def check_llama_cpp(path, directory, original):
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, logits_all=False)
    problems = []
    with torch.no_grad():
        for start in (5, 60, 200):
            prompt = list(range(start, start + 20))
            inputs = torch.tensor([prompt])
            wanted = original.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, min_new_tokens=24, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )
            model.reset()
            found = []
            for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
                found.append(token)
                if len(found) == 24:
                    break
            if found != wanted[0, 20:].tolist():
                problems.append(f"llama.cpp: other tokens after {start}: {found}, not {wanted[0, 20:].tolist()}")
    for line in TEXT.splitlines() + ["Hello  world\n\n 12345 x", " leading", "I'll"]:
        if os.path.exists(directory / "tokenizer.model"):
            pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
            wanted = pieces.encode(line)
        else:
            wanted = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(line).ids
        found = model.tokenize(line.encode(), add_bos=False, special=False)
        if found != wanted:
            problems.append(f"llama.cpp: {line!r} is {found}, not {wanted}")
    return problems


def check(root):
    report, counts = {}, {"gguf": 0, "transformers": 0, "llama.cpp": 0}
    try:
        import llama_cpp  # noqa: F401
        has_llama_cpp = True
    except ImportError:
        has_llama_cpp = False
    for name, _, _, _, is_whole in MODELS:
        directory = root / name
        original = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for kind in ("float32", "bfloat16", "q8_0"):
            path = root / f"{name}.{kind}.gguf"
            problems = check_tensors(path, directory, kind)
            counts["gguf"] += 1
            if kind == "float32" and is_whole:
                problems += check_transformers(path, original)
                counts["transformers"] += 1
            if kind == "float32" and has_llama_cpp:
                problems += check_llama_cpp(path, directory, original)
                counts["llama.cpp"] += 1
            if problems:
                report[path.name] = problems
    print(json.dumps({"problems": report, "counts": counts}))


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
