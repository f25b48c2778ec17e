"""Writes SentencePiece models and tiktoken ranks beside this script, and what the reference libraries make of tricky
texts and of ids in any order.

    pip install sentencepiece==0.2.3 tiktoken==0.14.0
    python generate.py

`*.model` are SentencePiece models, `*.tiktoken` lines of a token in base64 and its rank. `sentencepiece.json` has, for
each model, its special ids and the ids of every text; where decoding these does not give the text again, `texts` has
what it gives instead. `tiktoken.json` has the same for pairs of ranks and a pattern, once with special tokens read as
plain text (`ids`) and once as themselves (`ids_with_special`). `sequences` are random ids and their text, with invalid
UTF-8 replaced.
"""

import base64
import json
import pathlib
import random

import sentencepiece
import tiktoken
from tiktoken._educational import bpe_train

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "",
    " ",
    "  ",
    "   three spaces before",
    "three spaces after   ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    "\t",
    "\ttabs\t\tinside\t",
    " \n \n ",
    "line one\nline two\r\nline three\rline four",
    "\u00a0no-break\u00a0space\u00a0",
    "ideographic\u3000space",
    "thin\u2009space\u200bzero width",
    "Hello, world!",
    "hello world",
    "HELLO WORLD",
    "It's what they'll say: we'd've, I'M, YOU'RE, DON'T",
    "the quick brown fox jumps over the lazy dog",
    "0",
    "12345678901234567890",
    "1 22 333 4444 55555",
    "$1,234,567.89 (−3.5%)",
    "3.14159e-10",
    "١٢٣ ४५६ ½ ²³ Ⅻ",
    "Grüße, Jürgen",
    "Gru\u0308\u00dfe decomposed e\u0301",
    "naïve café",
    "İstanbul ıI ſ ẞ",
    "ﬁ ﬂ ﬃ ligatures",
    "Ｆｕｌｌｗｉｄｔｈ ＡＢＣ １２３",
    "㎏ ㌔ ℡ ™ ①",
    "漢字かな交じり文",
    "ﾊﾝｶｸ ｶﾞｷﾞ",
    "한국어 한글",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "Привет, мир",
    "Γειά σου Κόσμε",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👍",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "❤️❤",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "\ufeffbyte order mark",
    "\ufffd replacement",
    "null\x00byte",
    "bell\x07 and escape\x1b[0m",
    "\u202eright to left\u202c",
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "<s>hello</s>",
    "<unk> <pad> <0x41>",
    "▁ lower ▁one▁ eighth",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "<|begin_of_text|>a<|eot_id|>b <|eot_id|> c<|eot",
    "<|fim_prefix|><|fim_suffix|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a_b-c?d=e&f=%20g#h",
    "snake_case camelCase PascalCase kebab-case SCREAMING_SNAKE",
    "....!!!???---___***",
    " leading\n trailing \n",
    "mixed漢字and ascii",
    "x" + " " * 40 + "y",
]
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Without these options SentencePiece does as T5 does; the others follow Llama 2 and Gemma.
MODELS = {
    "unigram_nmt_nfkc": dict(
        model_type="unigram", normalization_rule_name="nmt_nfkc", byte_fallback=True, vocab_size=420
    ),
    "unigram_identity": dict(
        model_type="unigram",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        vocab_size=420,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁▁"],
    ),
    "unigram_without_bytes": dict(
        model_type="unigram",
        normalization_rule_name="identity",
        vocab_size=200,
        pad_id=0,
        eos_id=1,
        bos_id=-1,
        unk_id=2,
        unk_surface=" ⁇ ",
    ),
    "bpe_dummy_prefix": dict(
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        vocab_size=460,
    ),
    "bpe_identity": dict(
        model_type="bpe",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        vocab_size=460,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        control_symbols=["<mask>"],
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
    ),
    # Rules of its own: longest match first, and one character may become several or none.
    "bpe_own_rules": dict(
        model_type="bpe",
        normalization_rule_tsv="rules",
        byte_fallback=True,
        vocab_size=420,
        treat_whitespace_as_suffix=True,
    ),
}
RULES = {
    "ß": "ss",
    "ﬁ": "fi",
    "u\u0308": "ü",
    "\u200b": "",
    "\t": " ",
    "\n": " ",
    "\u3000": " ",
    "—": "-",
    "a\u0301b": "X",
}


def corpus():
    generator = random.Random(0)
    words = (
        "the of and to in is model token train batch layer head loss step norm scale while before after under".split()
    )
    words += "fn let return def self None true 0 1 7 12 2024 == != () {} ; Grüße naïve 漢字 かな Привет мир 👍 it's don't".split()
    lines = [
        "".join(generator.choice(words) + generator.choice([" ", " ", " ", "  ", ", "]) for _ in range(14))
        for _ in range(240)
    ]
    return (
        lines
        + [
            line
            for text in TEXTS
            for line in text.split("\n")
            if line.strip() and line.isascii() and line.isprintable()
        ]
        * 2
    )


def train_sentence_piece(name, options):
    if options.get("normalization_rule_tsv"):
        path = HERE / "rules.tsv"
        code = lambda text: " ".join(f"{ord(character):X}" for character in text)
        path.write_text("".join(f"{code(source)}\t{code(target)}\n" for source, target in RULES.items()))
        options = options | dict(normalization_rule_tsv=str(path))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_prefix=str(HERE / name),
        hard_vocab_limit=options["model_type"] == "bpe",
        num_threads=1,
        minloglevel=2,
        character_coverage=1.0,
        **options,
    )
    (HERE / f"{name}.vocab").unlink()
    (HERE / "rules.tsv").unlink(missing_ok=True)


def sequences(size, decode, seed):
    generator = random.Random(seed)
    rows = [[generator.randrange(size) for _ in range(length)] for length in [1, 1, 1, 2, 2, 3, 5, 8, 13, 21, 21, 34]]
    return [{"ids": row, "text": decode(row)} for row in rows]


def changed(decoded):
    return {str(index): text for index, (text, source) in enumerate(zip(decoded, TEXTS)) if text != source}


def sentence_pieces():
    entries = {}
    for name, options in MODELS.items():
        train_sentence_piece(name, options)
        model = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{name}.model"))
        ids = [model.encode(text) for text in TEXTS]
        special = {"unk": model.unk_id(), "bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id()}
        entries[name] = {
            "vocab_size": model.vocab_size(),
            "special": special,
            "ids": ids,
            "texts": changed([model.decode(row) for row in ids]),
            "sequences": sequences(model.vocab_size(), model.decode, 1),
        }
    return entries


def train_ranks():
    """Ranks whose single bytes stand in the order of GPT-2: those that print first."""
    ranks = bpe_train("\n".join(corpus() + TEXTS[51:54] * 4), 520, O200K, visualise=None)
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printing + [byte for byte in range(256) if byte not in printing]
    return ranks | {bytes([byte]): rank for rank, byte in enumerate(order)}


def ranks():
    ranks = train_ranks()
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    (HERE / "ranks.tiktoken").write_text("".join(lines))
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>", "<|fim_prefix|>"]
    special = {name: len(ranks) + index for index, name in enumerate(names)} | {"<|fim_suffix|>": len(ranks) + 9}
    entries = {}
    for name, pattern in {"cl100k": CL100K, "o200k": O200K}.items():
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        ids = [encoding.encode_ordinary(text) for text in TEXTS]
        assert [encoding.decode(row) for row in ids] == TEXTS
        with_special = [encoding.encode(text, allowed_special="all") for text in TEXTS]
        entries[name] = {
            "ranks": "ranks.tiktoken",
            "pattern": pattern,
            "special": special,
            "ids": ids,
            "ids_with_special": {str(n): row for n, row in enumerate(with_special) if row != ids[n]},
            "sequences": sequences(len(ranks), encoding.decode, 2),
        }
    return entries


def write(name, content):
    """One line for each row of ids."""
    text = json.dumps(content, ensure_ascii=True, indent=1)
    (HERE / name).write_text(join_numbers(text) + "\n")


def join_numbers(text):
    lines, row = [], None
    for line in text.split("\n"):
        number = line.strip().rstrip(",").lstrip("-").isdigit()
        if number and lines and (row or lines[-1].endswith("[")):
            lines[-1] += line.strip() if lines[-1].endswith("[") else " " + line.strip()
            row = True
        elif row and line.strip().startswith("]"):
            lines[-1] += line.strip()
            row = None
        else:
            lines.append(line)
    return "\n".join(lines)


def main():
    write("sentencepiece.json", {"texts": TEXTS, "models": sentence_pieces()})
    write("tiktoken.json", {"texts": TEXTS, "encodings": ranks()})
    print(len(TEXTS), "texts")


if __name__ == "__main__":
    main()
