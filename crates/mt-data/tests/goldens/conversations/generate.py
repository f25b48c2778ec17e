"""Writes files beside this script: `tokenizer.json`, `conversations.json` with tokens of conversations and their masks,
and `conversations.parquet` with the conversations of the first cases, in row groups of two.

    pip install transformers==5.23.0 trl==1.16.0 jinja2==3.1.6 pyarrow==26.0.1
    python generate.py

`strftime_now` stands still at `now`. Each case has a `template` (the name of a file in `../chat_templates`, `marked` for
that of this script, or null), a `record`, `tokens`, and `trained`, the tokens that have a loss. Masks of prompts and
answers are as in TRL's `SFTTrainer`, masks of marked templates are those of
`apply_chat_template(return_assistant_tokens_mask=True)`.
"""

import datetime
import json
import pathlib

import pyarrow
import pyarrow.parquet
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from trl.data_utils import common_prefix_length, is_conversational

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2026, 11, 23)
SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
MARKED = """{{- bos_token -}}
{% for message in messages %}
    {%- if message.role == 'assistant' -%}
        <|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}
        {%- generation -%}
        {{ message.content | trim }}<|eot_id|>
        {%- endgeneration -%}
    {%- else -%}
        <|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\\n\\n' + message.content | trim }}<|eot_id|>
    {%- endif -%}
{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{% endif %}
"""


def message(role, content):
    return dict(role=role, content=content)


TURNS = [
    message("system", "Be brief."),
    message("user", "What is 2 + 2?"),
    message("assistant", "4"),
    message("user", "And twice that, in words, für Zürich? 漢字"),
    message("assistant", "\n\nEight — acht.  "),
]
PAIRS = [
    dict(prompt="The capital of France is", completion=" Paris."),
    dict(prompt="Count: ", completion="1 2 3"),
    # The tokens at the boundary merge.
    dict(prompt="hell", completion="o world"),
    dict(prompt=TURNS[:2], completion=TURNS[2:3]),
    dict(prompt=TURNS[:4], completion=TURNS[4:]),
]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def main():
    chat_template_utils.datetime = Clock
    inner = Tokenizer.from_file(str(HERE / "../llama3.json"))
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.save(str(HERE / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
    cases = []

    def add(template, record, tokens, trained):
        cases.append(dict(template=template, record=record, tokens=list(tokens), trained=[bool(one) for one in trained]))

    for turns in [TURNS, TURNS[:3], TURNS[1:]]:
        made = tokenizer.apply_chat_template(
            turns, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        add("marked", dict(messages=turns), made["input_ids"], made["assistant_masks"])
    for pair in PAIRS:
        if is_conversational(pair):
            template = (HERE / "../chat_templates/llama3.jinja").read_text()
            render = lambda messages, **more: tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, **more
            )["input_ids"]
            prompt = render(pair["prompt"], add_generation_prompt=True)
            both = render(pair["prompt"] + pair["completion"])
            name = "llama3"
        else:
            prompt = tokenizer(pair["prompt"], add_special_tokens=False)["input_ids"]
            both = tokenizer(pair["prompt"] + pair["completion"], add_special_tokens=False)["input_ids"]
            both = both + [tokenizer.eos_token_id]
            name = None
        shared = common_prefix_length(prompt, both)
        add(name, pair, both, [index >= shared for index in range(len(both))])
    # All messages have the same fields, which are null where a message has none.
    fields = [(name, pyarrow.string()) for name in ["role", "content", "name"]]
    types = pyarrow.schema([("id", pyarrow.int64()), ("messages", pyarrow.list_(pyarrow.struct(fields)))])
    rows = [dict(id=index, messages=case["record"]["messages"]) for index, case in enumerate(cases[:3])]
    table = pyarrow.Table.from_pylist(rows, schema=types)
    pyarrow.parquet.write_table(table, HERE / "conversations.parquet", row_group_size=2, compression="none")
    content = dict(now=NOW.isoformat(), marked=MARKED, cases=cases)
    (HERE / "conversations.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


main()
