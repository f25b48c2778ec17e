"""Languages that `maxtext data clean` finds, beside those of lingua and py3langid.

    pip install lingua-language-detector py3langid spacy django
    cargo build --release -p mt-cli
    python bench/data/languages.py target/release/maxtext

Texts come with their languages: messages of Django's translations, joined to documents of about 400 characters without
placeholders and marks, and the sentences of spaCy's examples, which are short. Prints one JSON object a line: the accuracy of
each program and how often two agree, over the languages that all three know. Each program chooses among all of its languages.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import django
import py3langid
import spacy
from lingua import Language, LanguageDetectorBuilder

CHARACTERS = 400
# A language that no text has, so that every verdict names the language that was found.
ABSENT = "Esperanto"
# Codes of catalogs and spaCy that are not those of ISO 639-1.
CATALOGS = {"zh_Hans": "zh", "zh_Hant": "zh", "pt_BR": "pt", "es_AR": "es", "es_MX": "es", "en_GB": "en", "sr_Latn": None, "no": "nb"}
# Norwegian is one language to some programs.
NORWEGIAN = {"nn": "nb", "no": "nb"}


def messages(path):
    """The translations of a catalog, in its order."""
    for block in open(path, encoding="utf-8").read().split("\n\n"):
        if block.lstrip().startswith("#,") and "fuzzy" in block.split("\n")[0]:
            continue
        found = re.search(r'^msgstr(?:\[0\])? ((?:".*"\n?)+)', block, re.MULTILINE)
        if not found or 'msgid ""\nmsgstr' in block:
            continue
        text = "".join(json.loads(line) for line in found.group(1).strip().split("\n") if line.endswith('"') and "\\x" not in line)
        text = re.sub(r"%\(\w+\)s|%s|%d|\{\w*\}|<[^>]*>|[\"“”„«»()\[\]*]", " ", text)
        text = " ".join(text.split())
        if len(text) >= 25:
            yield text


def documents():
    root = os.path.dirname(django.__file__)
    catalogs = [os.path.join(root, "conf/locale")] + [os.path.join(root, "contrib", name, "locale") for name in sorted(os.listdir(os.path.join(root, "contrib")))]
    for directory in filter(os.path.isdir, catalogs):
        for code in sorted(os.listdir(directory)):
            language = CATALOGS.get(code, code.split("_")[0])
            for name in ["django.po", "djangojs.po"]:
                path = os.path.join(directory, code, "LC_MESSAGES", name)
                if language is None or code == "en" or not os.path.exists(path):
                    continue
                text = ""
                for message in messages(path):
                    text += message + "\n"
                    if len(text) >= CHARACTERS:
                        yield "documents", language, text
                        text = ""
    directory = os.path.join(os.path.dirname(spacy.__file__), "lang")
    for code in sorted(os.listdir(directory)):
        if code != "xx" and os.path.exists(os.path.join(directory, code, "examples.py")):
            for text in importlib.import_module(f"spacy.lang.{code}.examples").sentences:
                yield "sentences", code, text


def ours(program, texts, codes):
    with tempfile.TemporaryDirectory() as directory:
        source, output = os.path.join(directory, "texts.jsonl"), os.path.join(directory, "out")
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))
        begin = time.time()
        done = subprocess.run([program, "data", "clean", source, "--output", output, "--language", ABSENT, "--annotate", "--keep-equal"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seconds, found = time.time() - begin, {}
        for name in sorted(os.listdir(output)):
            if name.startswith("clean-"):
                for record in map(json.loads, open(os.path.join(output, name))):
                    found[record["id"]] = codes.get(record["removed_by"]["language"])
    return [found[number] for number in range(len(texts))], seconds


def known_codes(program):
    """The codes that the error about an unknown language names."""
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "one.txt")
        open(source, "w").write("one")
        done = subprocess.run([program, "data", "clean", source, "--output", os.path.join(directory, "out"), "--language", "none of these"], capture_output=True, text=True)
    return set(done.stderr.split("one of the codes ")[1].split("\n")[0].strip().split(", "))


def main(program):
    of_lingua = {language: language.iso_code_639_1.name.lower() for language in Language.all()}
    codes = {language.iso_code_639_3.name.lower(): code for language, code in of_lingua.items()}
    # Individual languages that whatlang names where others name the macrolanguage.
    codes |= {"cmn": "zh", "pes": "fa", "nob": "nb", "arb": "ar", "ydd": "yi", "uzb": "uz", "aze": "az", "azj": "az", "ekk": "et", "lvs": "lv", "est": "et", "lav": "lv", "ara": "ar"}
    known = known_codes(program)
    langid = py3langid.langid.LanguageIdentifier.from_model_file(py3langid.langid.MODEL_FILE)
    shared = {codes[code] for code in known if code in codes} & set(of_lingua.values()) & set(langid.labels) - {codes["epo"]}
    selected = [(kind, NORWEGIAN.get(language, language), text) for kind, language, text in documents() if language in shared]
    texts = [text for _, _, text in selected]
    detector = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()
    begin = time.time()
    lingua = [of_lingua[found] if (found := detector.detect_language_of(text)) else None for text in texts]
    lingua_seconds = time.time() - begin
    begin = time.time()
    by_langid = [langid.classify(text)[0] for text in texts]
    langid_seconds = time.time() - begin
    own, seconds = ours(program, texts, codes)
    found = {"maxtext": own, "lingua": lingua, "py3langid": by_langid}
    found = {name: [NORWEGIAN.get(code, code) for code in codes_] for name, codes_ in found.items()}
    for kind in ["documents", "sentences"]:
        places = [place for place, (of, _, _) in enumerate(selected) if of == kind]
        share = lambda same: round(sum(map(same, places)) / len(places), 4)
        accuracy = {name: share(lambda place: codes_[place] == selected[place][1]) for name, codes_ in found.items()}
        agreement = {other: share(lambda place: found["maxtext"][place] == found[other][place]) for other in ["lingua", "py3langid"]}
        print(json.dumps({"texts": kind, "count": len(places), "languages": len({selected[place][1] for place in places}), "accuracy": accuracy, "agreement_of_maxtext": agreement}), flush=True)
        agreed = [place for place in places if found["lingua"][place] == found["py3langid"][place]]
        same = sum(found["maxtext"][place] == found["lingua"][place] for place in agreed)
        print(json.dumps({"texts": kind, "both_others_agree": len(agreed), "agreement_of_maxtext": round(same / len(agreed), 4)}))
        wrong = {}
        for place in places:
            if found["maxtext"][place] != selected[place][1]:
                pair = f"{selected[place][1]} as {found['maxtext'][place]}"
                wrong[pair] = wrong.get(pair, 0) + 1
        print(json.dumps({"texts": kind, "wrong_of_maxtext": dict(sorted(wrong.items(), key=lambda item: -item[1])[:12])}))
    print(json.dumps({"seconds": {"maxtext": round(seconds, 2), "lingua": round(lingua_seconds, 2), "py3langid": round(langid_seconds, 2)}, "characters": sum(map(len, texts)), "note": "maxtext with reading and writing, on all cores; lingua without the loading of its models"}))


main(sys.argv[1])
