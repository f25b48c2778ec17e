"""Writes `known_templates.json` beside this script: published chat templates of known families, and the tokens of answers
that TRL's training templates mark in conversations.

    pip install transformers==5.23.0 trl==1.16.0 jinja2==3.1.6 torch==2.15.0
    python generate.py

`templates` holds the templates as the families' models publish them, taken from the copies in TRL (Apache License 2.0). Each case has a
`template`, a `record`, the number of `tokens`, their `sha256` (of the JSON list without spaces), and the ranges of
`answers` among them: `apply_chat_template(return_assistant_tokens_mask=True)` with the template of
`get_training_chat_template`. The tokenizer is that of `../conversations`; `strftime_now` stands still at `now`.
"""

import datetime
import hashlib
import json
import pathlib

import trl
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from trl.chat_template_utils import get_training_chat_template

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2024, 7, 6, 9, 5, 3)
FAMILIES = {
    # The features that conversations need beyond plain turns.
    "llama3": ["system"],
    "qwen3": ["system", "reasoning", "tools"],
    "qwen3_instruct_2507": ["system", "tools"],
    "qwen2_5": ["system", "tools"],
    "gemma": [],
    "gemma3": ["system"],
    "gptoss": ["system", "reasoning", "tools"],
    "phi3": ["system"],
    "phi3_5": ["system"],
    "deepseekv3": ["system", "tools"],
    "deepseek_r1_distill": ["system", "reasoning"],
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def message(role, content, **fields):
    return dict(role=role, content=content) | fields


USER = message("user", " Which is larger, 9.8 or 9.11?\n")
TURNS = [
    USER,
    # Without a space at the beginning, where transformers finds no token of byte-level tokenizers.
    message("assistant", "9.8 — neun Komma acht.\n"),
    message("user", "And für Zürich? 漢字"),
    message("assistant", "The same."),
]
SYSTEM = message("system", "Be brief.")
WEATHER = dict(
    type="function",
    function=dict(
        name="weather",
        description="The weather of a city.",
        parameters=dict(type="object", properties=dict(city=dict(type="string", description="A city")), required=["city"]),
    ),
)


def call(content, **arguments):
    tool = dict(type="function", function=dict(name="weather", arguments=arguments))
    return message("assistant", content, tool_calls=[tool])


def conversations(family, features):
    yield dict(messages=TURNS)
    yield dict(messages=TURNS[:2])
    if "system" in features:
        yield dict(messages=[SYSTEM] + TURNS)
    if "reasoning" in features:
        thought = dict(thinking="9.80 > 9.11") if family == "gptoss" else dict(reasoning_content="9.80 > 9.11")
        if family == "deepseek_r1_distill":
            thoughtful = message("assistant", "<think>\n9.80 > 9.11\n</think>\n\n9.8")
        else:
            thoughtful = message("assistant", "9.8", **thought)
        yield dict(messages=[USER, thoughtful])
        yield dict(messages=[SYSTEM, USER, thoughtful] + TURNS[2:])
    if "tools" in features:
        result = message("tool", "18 degrees")
        yield dict(messages=[SYSTEM, USER, call("", city="Zürich"), result, message("assistant", "It is 18.")], tools=[WEATHER])
        yield dict(messages=[USER, call("Let me see.", city="Bern"), result, TURNS[3]] + TURNS, tools=[WEATHER])


def ranges(mask):
    found, start = [], None
    for index, one in enumerate(list(mask) + [0]):
        if one and start is None:
            start = index
        if not one and start is not None:
            found.append([start, index])
            start = None
    return found


def main():
    chat_template_utils.datetime = Clock
    templates, cases = {}, []
    published = pathlib.Path(trl.__file__).parent / "chat_templates"
    for family, features in FAMILIES.items():
        templates[family] = (published / f"{family}.jinja").read_text()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(HERE / "../conversations/tokenizer.json")),
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
            chat_template=templates[family],
        )
        training = get_training_chat_template(processing_class=tokenizer)
        for record in conversations(family, features):
            made = tokenizer.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                chat_template=training,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            tokens = made["input_ids"]
            text = json.dumps(tokens, separators=(",", ":"))
            case = dict(template=family, record=record, tokens=len(tokens))
            case["sha256"] = hashlib.sha256(text.encode()).hexdigest()
            cases.append(case | dict(answers=ranges(made["assistant_masks"])))
    content = dict(now=NOW.isoformat(), templates=templates, cases=cases)
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    text = json.dumps(content | dict(cases=None), indent=1, ensure_ascii=False)
    text = text.replace('"cases": null', '"cases": [\n  ' + ",\n  ".join(lines) + "\n ]")
    assert json.loads(text) == content
    (HERE / "known_templates.json").write_text(text + "\n")


main()
