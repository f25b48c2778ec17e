"""Writes `models/`: small SentencePiece and tiktoken tokenizers, and what the reference libraries make of tricky texts.

    pip install sentencepiece==0.2.3 tiktoken==0.14.0
    python generate_models.py
"""

import base64
import io
import json
import pathlib
import random

import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2

OUTPUT = pathlib.Path(__file__).parent / "models"
CORPUS = [
    "the quick brown fox jumps over the lazy dog's back while the children play in the garden",
    "training the model on more tokens makes the loss fall, until it does not fall any more",
    "def forward(self, x):\n    return self.down(self.gate(x).silu() * self.up(x))",
    "    if (index < length) { values[index] += 1; } else { return values; }",
    "In 2024 they sold 1,234,567 copies for $89.99 each, 42% more than in 2023",
    "Grüße aus München, wo der Bürgermeister die Straße über die Brücke führen möchte",
    "l'été dernier, ils ont été à la plage où l'eau était très agréable",
    "漢字かな交じり文を書くのは難しいが、日本語の文章は読みやすい",
    "быстрая коричневая лиса перепрыгивает через ленивую собаку",
    "aaaa aaaaa aaaaaaa abab ababab bababa aabbaabb",
] * 3
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "a",
    "Hello, world! It's 2024 and they'll pay $1,234,567.89.",
    "  leading and trailing  \n\n\tdef f(x):\n        return x ** 2\r\n",
    "Grüße, Jürgen ❤ — 漢字かな交じり文 👩‍👩‍👧‍👦 naïve İstanbul ŉ ﬁne ①②③ ｆｕｌｌ　ｗｉｄｔｈ ～",
    "e\u0301 vs é, A\u030a vs Å, q\u0307\u0323",
    "<s>text</s> <unk> <0x41> <|begin_of_text|><|eot_id|> <mask> <mask>mask ▁under ▁▁ score▁",
    "aaaaaaaaaaa aaaa  aaaaa   ababababa",
    "zero\u200bwidth\u200d\ufeff soft\u00adhyphen nul\u0000 bell\u0007 nbsp\u00a0line\u2028sep\x85",
    "العربية עברית हिन्दी ไทย 한국어",
    "🤗🤗 𝕳𝖊𝖑𝖑𝖔 \U0010ffff \ue000 \ufffd",
    "tabs\tand\r\nnewlines\n\n\n  mixed \t \n end ",
    "don't can't we'll I'VE 12345678901234567890",
]


def fuzz(count, seed):
    rng = random.Random(seed)
    alphabet = list("aaabbeeiot   \n'.,0123<>▁") + ["é", "ü", "漢", "字", "の", "ж", "👩", "\u200d", "ﬁ", "　", "<mask>", " the", "▁▁", "\u0301"]
    return ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def train(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, minloglevel=2, num_threads=1, character_coverage=0.99,
        hard_vocab_limit=options["model_type"] == "bpe", **options
    )
    return model.getvalue()


def with_unused(model, every):
    """Marks some pieces as unused, so that byte pair encoding has to take them apart again."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    normal = [piece for piece in proto.pieces if piece.type == piece.NORMAL and len(piece.piece) > 1]
    for piece in normal[::every]:
        piece.type = piece.UNUSED
    return proto.SerializeToString(deterministic=True)


def sentence_pieces():
    rules = OUTPUT / "rules.tsv"
    # Code points of what is replaced, and of what replaces it: an umlaut, a ligature, white space, a removal.
    rules.write_text("FC\t75 65\nFB01\t66 69\n3000\t20\n9\t20\nA\t20\n200B\t\n65 301\tE9\n")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    models = {
        "unigram_bytes": train(
            model_type="unigram", vocab_size=520, byte_fallback=True, split_digits=True, add_dummy_prefix=False,
            user_defined_symbols=["<mask>", "▁▁"], **plain,
        ),
        "unigram_suffix": train(
            model_type="unigram", vocab_size=220, treat_whitespace_as_suffix=True, normalization_rule_tsv=str(rules),
            control_symbols=["<cls>"], pad_id=3,
        ),
        "bpe_llama2": train(
            model_type="bpe", vocab_size=560, byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, **plain,
        ),
        "bpe_gemma": train(
            model_type="bpe", vocab_size=560, byte_fallback=True, add_dummy_prefix=False,
            user_defined_symbols=["<mask>", "▁▁", "▁▁▁▁", "\n\n"], pad_id=0, eos_id=1, bos_id=2, unk_id=3, **plain,
        ),
        "bpe_rules": train(model_type="bpe", vocab_size=240, normalization_rule_tsv=str(rules), unk_surface="??"),
    }
    models["bpe_unused"] = with_unused(models["bpe_llama2"], 3)
    models["unigram_unused"] = with_unused(models["unigram_bytes"], 3)
    rules.unlink()
    return models


def describe_sentence_piece(model, texts):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    rng = random.Random(7)
    rows = [[rng.randrange(processor.vocab_size()) for _ in range(24)] for _ in range(12)]
    ends = []
    for text in texts:
        pieces = processor.encode(text, return_type="proto").pieces
        ends.append([piece.end for piece in pieces])
    ids = [processor.encode(text) for text in texts]
    special = [processor.bos_id(), processor.eos_id(), processor.pad_id(), processor.unk_id()]
    return {
        "special": [None if id < 0 else id for id in special],
        "ids": ids,
        "ends": ends,
        "decoded": [processor.decode(row) for row in ids],
        "rows": rows,
        "rows_decoded": [processor.decode(row) for row in rows],
    }


def byte_ranks(num_merges):
    """Ranks as byte pair encoding learns them, by counting pairs in the corpus."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[word[i : i + 1] for i in range(len(word))] for word in (w.encode() for text in CORPUS for w in text.split(" "))]
    words += [[b" "] + word for word in words]
    while len(ranks) < 256 + num_merges:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[left + right] = len(ranks)
        for word in words:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    return ranks


def llama3_special(first):
    names = ["<|begin_of_text|>", "<|end_of_text|>"] + [f"<|reserved_special_token_{n}|>" for n in range(4)]
    names += ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    names += [f"<|reserved_special_token_{n}|>" for n in range(5, 251)]
    return {name: first + index for index, name in enumerate(names)}


def describe_tiktoken(ranks, texts):
    encoding = tiktoken.Encoding("golden", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens=llama3_special(len(ranks)))
    rng = random.Random(7)
    rows = [[rng.randrange(len(ranks)) for _ in range(24)] for _ in range(12)]
    ids = [encoding.encode(text, disallowed_special=()) for text in texts]
    return {
        "special": [len(ranks), len(ranks) + 1, None, None],
        "ids": ids,
        "with_special": [encoding.encode(text, allowed_special="all") for text in texts],
        "decoded": [encoding.decode(row) for row in ids],
        "rows": rows,
        "rows_decoded": [encoding.decode(row) for row in rows],
    }


def main():
    OUTPUT.mkdir(exist_ok=True)
    texts = TEXTS + fuzz(60, 1)
    content = {"texts": texts, "models": {}}
    for name, model in sentence_pieces().items():
        (OUTPUT / f"{name}.model").write_bytes(model)
        content["models"][name] = describe_sentence_piece(model, texts)
    ranks = byte_ranks(300)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (OUTPUT / "tiktoken.model").write_text("".join(lines))
    content["models"]["tiktoken"] = describe_tiktoken(ranks, texts)
    (OUTPUT / "models.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
