"""Writes the goldens beside this script: tokenizers built like those of published model families, what the reference
library makes of some texts, and parquet files by the reference writer.

    pip install tokenizers==0.23.3 pyarrow==26.0.1
    python generate.py
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "Hello, world! It's 2024 and they'll pay $1,234,567.89.",
    "  leading and trailing  \n\n\tdef f(x):\n        return x ** 2\r\n",
    "Grüße, Jürgen ❤ — 漢字かな交じり文 👩‍👩‍👧‍👦 naïve İstanbul",
    "a<|eot|>b <|eot|> c",
    "",
    " ",
    "🤗",
]
CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog's back " * 4, "while training the model the loss falls\n"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pattern, normalizer=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA3))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|bos|>"), AddedToken("<|eot|>")])
    bos = tokenizer.token_to_id("<|bos|>")
    template = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


def sentence_piece():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = [text for text in CORPUS if text.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def main():
    kinds = {
        "gpt2": byte_level(None),
        "llama3": byte_level(LLAMA3),
        "qwen": byte_level(QWEN, normalizers.NFC()),
        "llama2": sentence_piece(),
        "t5": unigram(),
    }
    expected = {}
    for name, tokenizer in kinds.items():
        (HERE / f"{name}.json").write_text(tokenizer.to_str())
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
        expected[name] = {"ids": ids, "texts": [tokenizer.decode(row) for row in ids]}
    content = {"texts": TEXTS, "tokenizers": expected}
    (HERE / "tokenizers.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    rows = [None if n % 10 == 3 else f"row {n % 7} {'é' * (n % 5)}" for n in range(500)]
    table = pa.table({
        "id": list(range(500)),
        "body": [{"text": text, "n": n} for n, text in enumerate(rows)],
        "text": rows,
        "large": pa.array(rows, pa.large_string()),
        "tags": [["a", "b"]] * 500,
    })
    for version in ["1.0", "2.0"]:
        for codec in ["snappy", "zstd", "gzip", "lz4"]:
            path = HERE / f"{codec}_v{version[0]}.parquet"
            pq.write_table(table, path, compression=codec, data_page_version=version, row_group_size=128)


if __name__ == "__main__":
    main()
