"""Writes tokenizer.json, a small byte-level vocabulary, and numbers.json: its tokens' numbers without distinctions of case,
accents, forms of characters and white space.

Needs tokenizers (the library of Hugging Face), whose normalizers compare texts.
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

FOLDER = pathlib.Path(__file__).parent
TEXTS = [
    "Apple", " apple", "APPLE", "\uff21\uff30\uff30\uff2c\uff25", "caf\u00e9", "cafe", "Cafe\u0301", " CAF\u00c9 ",
    "\u00bd", "1\u20442", " ", "  ", "\t", "\n", "\r\n ", "a b", "a\t b", "A \n B", "\u0130", "i", "\u01c5", "\u01c6",
    "\ufb01", "fi", "\u0e01\u0e49", "\u0e01", "\u4e2d", "stra\u00dfe", "STRASSE", "\u00a0", "x\u00a0y", "x y", "_x", "x_",
]
letters = pre_tokenizers.ByteLevel.alphabet()
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
for letter in sorted(letters):
    vocabulary.setdefault(letter, len(vocabulary))
for text in TEXTS:
    spelled = "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
    vocabulary.setdefault(spelled, len(vocabulary))
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = byte_level
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ["<pad>", "<s>", "</s>"]])
tokenizer.save(str(FOLDER / "tokenizer.json"))

normalizer = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)
known, numbers = {}, []
for token in range(tokenizer.get_vocab_size()):
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        key = tokenizer.id_to_token(token)
    else:
        normal = normalizer.normalize_str(text)
        # A single space is a token of its own; other texts lose those around them.
        normal = normal if normal == " " else normal.strip()
        key = normal or text
    numbers.append(known.setdefault(key, len(known)))
(FOLDER / "numbers.json").write_text(json.dumps(numbers) + "\n")
print(len(numbers), len(known))
