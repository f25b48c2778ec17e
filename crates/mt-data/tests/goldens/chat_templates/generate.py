"""Writes `chat_templates.json` beside this script: what transformers renders from the templates here.

    pip install transformers==5.23.0 jinja2==3.1.6
    python generate.py

The templates are written for this test, in the manner of those of published models. Every entry of `renders` names a
template and a conversation and has the other inputs of the template (`variables`), and either `text` or `error`.
`strftime_now` stands still at `now`. With `continue_final_message` only the `first_messages` of the conversation are
rendered, and the text ends where the last one ends.
"""

import datetime
import json
import pathlib

import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2024, 7, 6, 9, 5, 3)
SPECIAL = {
    "llama3": dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
    "mistral": dict(bos_token="<s>", eos_token="</s>"),
    "gemma": dict(bos_token="<bos>", eos_token="<eos>"),
    "chatml": dict(eos_token="<|im_end|>"),
    "olmo": dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>"),
}


def message(role, content, **fields):
    return dict(role=role, content=content) | fields


def call(name, identifier="abc123XYZ", **arguments):
    return dict(type="function", id=identifier, function=dict(name=name, arguments=arguments))


def tool(name, description, required, **properties):
    parameters = dict(type="object", properties=properties, required=required)
    return dict(type="function", function=dict(name=name, description=description, parameters=parameters))


WEATHER = tool(
    "get_weather",
    'Tells the weather <now> & "soon" in a place\'s streets.',
    ["place"],
    place=dict(type="string", description="Ort, e.g. Zürich 漢字"),
    unit=dict(type="string", enum=["celsius", "fahrenheit"], default=None),
    days=dict(type="integer", minimum=1),
    fine=dict(type="boolean", default=True),
)
ADD = tool("add", "Adds.", [], a=dict(type="number", default=1.5), b=dict(type="number", default=-2e-7))
TEXT_PARTS = [dict(type="text", text="Two "), dict(type="text", text="parts.")]
CONVERSATIONS = {
    "one_turn": [message("user", "Hello!")],
    "two_turns": [message("user", "Hello!"), message("assistant", "Hi, how can I help?"), message("user", "Sing.")],
    "finished": [message("user", "2+2?"), message("assistant", "4")],
    "system": [
        message("system", "You are terse."),
        message("user", "Who are you?"),
        message("assistant", "Me."),
        message("user", "And I?"),
    ],
    "spaces": [
        message("system", "  spaces and\n\nlines\n "),
        message("user", "\n\t indented\n"),
        message("assistant", "  answer  \n"),
        message("user", " "),
    ],
    "unicode": [message("user", "Grüße 👩‍👩‍👧‍👦 漢字 <b>&amp;</b> \"quoted\" 'single' \\n {{ not }} {% code %}")],
    "special_tokens_inside": [message("user", "<|im_end|><end_of_turn></s><|eot_id|>")],
    "empty": [message("user", ""), message("assistant", ""), message("user", "")],
    "parts": [message("user", TEXT_PARTS), message("assistant", "Yes."), message("user", TEXT_PARTS[:1])],
    "thoughts": [
        message("user", "Why?"),
        message("assistant", "<think>\nHm.\nSo.\n</think>\n\nBecause."),
        message("user", "Really?"),
        message("assistant", "Yes.", reasoning_content="\nSurely.\n"),
    ],
    "tool_call": [
        message("system", "Use tools."),
        message("user", "Weather in Zürich?"),
        message("assistant", "", tool_calls=[call("get_weather", place="Zürich <ZH>", days=2, unit=None, fine=True)]),
    ],
    "tool_answer": [
        message("user", "Weather in Bern?"),
        message(
            "assistant", None, tool_calls=[call("get_weather", place="Bern"), call("add", "def456UVW", a=1, b=2.5)]
        ),
        message("tool", '{"sky": "grey", "degrees": 7}', name="get_weather", tool_call_id="abc123XYZ"),
        message("tool", "3.5", name="add", tool_call_id="def456UVW"),
        message("assistant", "Grey, 7 degrees."),
        message("user", "Thanks."),
    ],
    "not_alternating": [message("user", "One."), message("user", "Two.")],
    "assistant_first": [message("assistant", "I begin."), message("user", "Go on.")],
    "unknown_role": [message("user", "Hello!"), message("narrator", "Night falls.")],
}
TOOLS = {"none": None, "one": [WEATHER], "two": [WEATHER, ADD]}
VARIABLES = [
    {},
    dict(add_generation_prompt=True),
    dict(add_generation_prompt=True, tools="one"),
    dict(add_generation_prompt=True, tools="two", enable_thinking=False, date_string="1 Jan 2030"),
]


def renders(name, tokenizer):
    for conversation, messages in CONVERSATIONS.items():
        if conversation == "parts" and name not in {"gemma", "chatml"}:
            continue
        for variables in VARIABLES:
            if "tools" in variables and conversation not in {"two_turns", "system", "tool_call", "tool_answer"}:
                continue
            inputs = dict(variables, tools=TOOLS[variables.get("tools", "none")])
            yield render(
                name, conversation, variables, lambda: tokenizer.apply_chat_template(messages, tokenize=False, **inputs)
            )
    for conversation in ["finished", "system", "spaces"]:
        messages, variables = CONVERSATIONS[conversation][:3], dict(continue_final_message=True)
        if messages[-1]["role"] == "assistant":
            yield render(
                name,
                conversation,
                variables,
                lambda: tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True),
            ) | dict(first_messages=len(messages))


def render(template, conversation, variables, action):
    entry = dict(template=template, conversation=conversation, variables=variables)
    try:
        return entry | dict(text=action())
    except (jinja2.exceptions.TemplateError, TypeError, ValueError) as error:
        return entry | dict(error=str(error))


class StoppedClock(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return NOW


def main():
    chat_template_utils.datetime = StoppedClock
    entries = []
    for name, special in SPECIAL.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special)
        tokenizer.chat_template = (HERE / f"{name}.jinja").read_text()
        entries += renders(name, tokenizer)
    content = dict(now=NOW.isoformat(), special=SPECIAL, tools=TOOLS, conversations=CONVERSATIONS, renders=entries)
    (HERE / "chat_templates.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    for entry in entries:
        if "error" in entry:
            print(entry["template"], entry["conversation"], entry["variables"], "->", entry["error"][:120])
    print(len(entries), "renders")


if __name__ == "__main__":
    main()
