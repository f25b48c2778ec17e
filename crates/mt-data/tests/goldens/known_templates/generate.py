"""Writes `tokenizer.json` and `known_templates.json` beside this script: published chat templates of known families, and
the tokens that TRL trains in conversations rendered by them.

    pip install transformers==5.24.0 trl==1.16.0 jinja2==3.1.6 torch==2.15.0
    python generate.py

The tokenizer has the special tokens of all families, each as one token. `templates` holds the templates as the families'
models publish them, taken from the copies in TRL (Apache License 2.0), and `special` the tokens that they name. Each case
has a `template`, a `record`, the number of `tokens`, their `sha256` (of the JSON list without spaces), and the ranges of
`answers` among them. For `messages`, these are `apply_chat_template(return_assistant_tokens_mask=True)` with the template of
`get_training_chat_template`; for `prompt` and `completion`, the tokens behind the prompt in the published template, as in
`SFTTrainer`. `strftime_now` stands still at `now`.
"""

import datetime
import hashlib
import json
import pathlib

import trl
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import common_prefix_length

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2024, 7, 6, 9, 5, 3)
LLAMA = ["<|begin_of_text|>", "<|eot_id|>"]
CHATML = [None, "<|im_end|>"]
GEMMA = ["<bos>", "<eos>"]
PHI = ["<s>", "<|endoftext|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
COHERE = ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]
FAMILIES = {
    # BOS and EOS, and the features that conversations need beyond plain turns.
    "llama3": (LLAMA, ["system"]),
    "llama3_1": (LLAMA, ["system", "tools"]),
    "llama3_2": (LLAMA, ["system", "tools"]),
    "qwen3": (CHATML, ["system", "reasoning", "tools"]),
    "qwen3_instruct_2507": (CHATML, ["system", "tools"]),
    "qwen3_vl": (CHATML, ["system", "tools"]),
    "qwen3_5_think": (CHATML, ["system", "reasoning", "tools"]),
    "qwen3_5_nothink": (CHATML, ["system", "reasoning", "tools"]),
    "qwen3_6": (CHATML, ["system", "reasoning", "tools"]),
    "qwen3_8": (CHATML, ["system", "reasoning", "tools"]),
    "qwen2_5": (CHATML, ["system", "tools"]),
    "qwen2_5_vl": (CHATML, ["system"]),
    "gemma": (GEMMA, []),
    "gemma3": (GEMMA, ["system"]),
    "gemma4_v5": (GEMMA, ["system", "reasoning", "tools"]),
    "gptoss": (["<|startoftext|>", "<|return|>"], ["system", "reasoning", "tools"]),
    "phi3": (PHI, ["system"]),
    "phi3_5": (PHI, ["system"]),
    "deepseekv3": (DEEPSEEK, ["system", "tools"]),
    "deepseek_r1_distill": (DEEPSEEK, ["system", "reasoning"]),
    "cohere": (COHERE, ["system"]),
    "cohere2": (COHERE, ["system"]),
    "glm4moe": ([None, "<|endoftext|>"], ["system", "reasoning", "tools"]),
    "lfm2": (["<|startoftext|>", "<|im_end|>"], ["system"]),
    "lfm2_v2": (["<|startoftext|>", "<|im_end|>"], ["system", "tools"]),
    "nemotron_3_nano": (CHATML, ["system", "reasoning", "tools"]),
    "nemotron_3_super": (CHATML, ["system", "reasoning", "tools"]),
    "nemotron_3_ultra": (CHATML, ["system", "reasoning", "tools"]),
    "nemotron_3_5_lightning": (CHATML, ["system", "reasoning", "tools"]),
    "muse_glimmer": (["<|begin_of_text|>", "<|eot|>"], ["system", "reasoning", "tools"]),
}
# Templates that TRL does not mark.
UNMARKED = ["llama3_1", "llama3_2", "gemma4_v5"]
# Tokens of the tokenizers' vocabularies that decoding keeps.
PLAIN = """
    <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>
""".split()
SPECIAL = """
    <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>
    <|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>
    <bos> <eos> <start_of_turn> <end_of_turn> <start_of_image>
    <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|think|>
    <|"|> <|startoftext|> <|return|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>
    <s> </s> <|system|> <|user|> <|assistant|>
    <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
    <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>
    <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
    <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>
    <|START_RESPONSE|> <|END_RESPONSE|> [gMASK] <sop> <|observation|>
    <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>
    <|eot|> <|eom|> <|patch|> <|video|>
""".split()


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


def pair(prompt, completion, **fields):
    return dict(prompt=prompt, completion=completion) | fields


def thoughtful_answer(family):
    if family == "deepseek_r1_distill":
        return message("assistant", "<think>\n9.80 > 9.11\n</think>\n\n9.8")
    return message("assistant", "9.8", **{"thinking" if family == "gptoss" else "reasoning_content": "9.80 > 9.11"})


def completions(family, features):
    system = [SYSTEM] if "system" in features else []
    yield pair(TURNS[:1], TURNS[1:2])
    yield pair(system + TURNS[:3], TURNS[3:])
    # The user's message between two answers is learned, too.
    yield pair(system + TURNS[:1], TURNS[1:])
    if "reasoning" in features:
        thoughtful = thoughtful_answer(family)
        yield pair([USER], [thoughtful])
        yield pair(system + [USER, thoughtful] + TURNS[2:3], [thoughtful])
    if "tools" in features:
        result = message("tool", "18 degrees")
        asked, zurich, bern = system + [USER], call("", city="Zürich"), call("", city="Bern")
        if family == "deepseekv3":
            # The published template concatenates texts.
            for one in [zurich, bern]:
                function = one["tool_calls"][0]["function"]
                function["arguments"] = json.dumps(function["arguments"])
        yield pair(asked, [zurich], tools=[WEATHER])
        yield pair(asked + [zurich, result], [message("assistant", "It is 18.")], tools=[WEATHER])
        yield pair(asked, [bern, result, TURNS[3]], tools=[WEATHER])


def conversations(family, features):
    yield dict(messages=TURNS)
    yield dict(messages=TURNS[:2])
    if "system" in features:
        yield dict(messages=[SYSTEM] + TURNS)
    if "reasoning" in features:
        thoughtful = thoughtful_answer(family)
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


def rendered(tokenizer, messages, record, **options):
    options |= dict(tools=record.get("tools"), tokenize=True, return_dict=True)
    return tokenizer.apply_chat_template(messages, **options)


def case(name, record, tokens, mask):
    text = json.dumps(tokens, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return dict(template=name, record=record, tokens=len(tokens), sha256=sha256, answers=ranges(mask))


def main():
    chat_template_utils.datetime = Clock
    inner = Tokenizer.from_file(str(HERE / "../llama3.json"))
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    inner.save(str(HERE / "tokenizer.json"))
    templates, special, cases = {}, {}, []
    published = pathlib.Path(trl.__file__).parent / "chat_templates"
    for name, ((bos, eos), features) in FAMILIES.items():
        templates[name] = (published / f"{name}.jinja").read_text()
        special[name] = dict(bos_token=bos, eos_token=eos)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=templates[name], **special[name])
        for record in conversations(name, features) if name not in UNMARKED else []:
            training = get_training_chat_template(processing_class=tokenizer)
            made = rendered(
                tokenizer, record["messages"], record, chat_template=training, return_assistant_tokens_mask=True
            )
            cases.append(case(name, record, made["input_ids"], made["assistant_masks"]))
        for record in completions(name, features):
            prompt = rendered(tokenizer, record["prompt"], record, add_generation_prompt=True)["input_ids"]
            whole = rendered(tokenizer, record["prompt"] + record["completion"], record)["input_ids"]
            shared = common_prefix_length(prompt, whole)
            cases.append(case(name, record, whole, [index >= shared for index in range(len(whole))]))
    content = dict(now=NOW.isoformat(), special=special, templates=templates, cases=cases)
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    text = json.dumps(content | dict(cases=None), indent=1, ensure_ascii=False)
    text = text.replace('"cases": null', '"cases": [\n  ' + ",\n  ".join(lines) + "\n ]")
    assert json.loads(text) == content
    (HERE / "known_templates.json").write_text(text + "\n")


main()
