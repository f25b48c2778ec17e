"""Writes generated documents with datatrove's verdicts, for the ordinary tests of mt-clean.

    pip install datatrove spacy xxhash nltk regex tldextract numpy
    python bench/data/clean_goldens.py crates/mt-clean/tests/goldens
"""

import json
import os
import random
import sys

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from clean import document, vocabulary

draws = random.Random(4)
words = vocabulary(draws)
filters = {"gopher_repetition": GopherRepetitionFilter(), "gopher_quality": GopherQualityFilter(), "c4": C4QualityFilter(), "fineweb": FineWebQualityFilter()}
with open(os.path.join(sys.argv[1], "verdicts.jsonl"), "w") as file:
    count = 0
    while count < 100:
        text = document(draws, words)
        if len(text) > 2000:
            continue
        verdicts = {}
        for name, filter_ in filters.items():
            kept = Document(text=text, id="0")
            result = filter_.filter(kept)
            verdicts[name] = None if result is True else result[1]
            if name == "c4":
                verdicts["c4_text"] = kept.text if result is True else None
        record = {"text": text, "verdicts": verdicts}
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        count += 1
