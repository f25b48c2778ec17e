"""The clients of OpenAI and Anthropic, as they are published, against a running server.

Arguments: a file with the server's URL.
"""

import json
import pathlib
import sys
from typing import Literal

import anthropic
import openai
import pydantic

URL = pathlib.Path(sys.argv[1]).read_text().strip()
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="key-of-test", max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key="key-of-test", max_retries=0)
MODEL = client.models.list().data[0].id
MESSAGES = [{"role": "user", "content": "Hello"}]
found = {"model": MODEL}


def completions():
    asked = dict(model=MODEL, prompt="All happy", max_tokens=12, temperature=0)
    whole = client.completions.create(**asked)
    assert whole.usage.prompt_tokens == 10 and whole.usage.completion_tokens == 12, whole.usage
    assert whole.choices[0].finish_reason == "length"
    found["completion"] = whole.choices[0].text
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage == whole.usage and not events[-1].choices

    scored = client.completions.create(model=MODEL, prompt=[[68, 69, 70], [71, 72]], max_tokens=1, temperature=0,
                                       logprobs=2, echo=True, seed=1234)
    assert [choice.index for choice in scored.choices] == [0, 1]
    first = scored.choices[0].logprobs
    assert len(first.tokens) == 4 and first.token_logprobs[0] is None, first
    assert all(value <= 0 for value in first.token_logprobs[1:])
    assert all(len(top) in (2, 3) for top in first.top_logprobs[1:]), first.top_logprobs
    # The greedy token is the most probable one.
    top = first.top_logprobs[-1]
    assert max(top, key=top.get) == first.tokens[-1]

    several = client.completions.create(model=MODEL, prompt="All", max_tokens=8, n=3, temperature=1.0, seed=7)
    again = client.completions.create(model=MODEL, prompt="All", max_tokens=8, n=3, temperature=1.0, seed=7)
    texts = [choice.text for choice in several.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) > 1, texts
    stopped = client.completions.create(model=MODEL, prompt="All happy", max_tokens=12, temperature=0,
                                        stop=[whole.choices[0].text[3:5]])
    assert stopped.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(whole.choices[0].text[3:5])]
    assert stopped.choices[0].finish_reason == "stop"


def chats():
    asked = dict(model=MODEL, messages=MESSAGES, max_completion_tokens=10, temperature=0)
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert whole.choices[0].message.role == "assistant"
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens and all(len(entry.top_logprobs) == 3 for entry in entries)
    joined = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert joined == whole.choices[0].message.content, (joined, whole.choices[0].message.content)
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


class Answer(pydantic.BaseModel):
    is_happy: bool
    family: Literal["alike", "unhappy"]


def structured():
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=400,
                                           temperature=1.0, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, Answer), parsed
    parsed = client.responses.parse(model=MODEL, input="Hello", text_format=Answer, max_output_tokens=400,
                                    temperature=1.0)
    assert isinstance(parsed.output_parsed, Answer), parsed
    extra = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}
    phone = client.completions.create(model=MODEL, prompt="Call", max_tokens=20, extra_body=extra)
    assert len(phone.choices[0].text) == 6 and phone.choices[0].finish_reason == "stop", phone


PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "today": {"type": "boolean"}},
    "required": ["unit", "today"],
    "additionalProperties": False,
}


def tools():
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}
    asked = dict(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=400,
                 parallel_tool_calls=False)
    whole = client.chat.completions.create(**asked)
    call = whole.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and whole.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"unit", "today"}
    with client.chat.completions.stream(**{**asked, "tool_choice": {"type": "function", "function": {"name": "weather"}}}) as stream:
        last = stream.get_final_completion()
    assert last.choices[0].message.tool_calls[0].function.name == "weather"
    history = MESSAGES + [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=[tool], max_tokens=4)

    flat = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    response = client.responses.create(model=MODEL, input="Hello", tools=[flat], tool_choice="required",
                                       parallel_tool_calls=False, max_output_tokens=400)
    assert response.output[-1].type == "function_call" and response.status == "completed", response

    message = claude.messages.create(
        model=MODEL, max_tokens=400, messages=MESSAGES, tool_choice={"type": "any", "disable_parallel_tool_use": True},
        tools=[{"name": "weather", "description": "The weather", "input_schema": PARAMETERS}])
    assert message.stop_reason == "tool_use" and message.content[-1].name == "weather", message
    assert set(message.content[-1].input) == {"unit", "today"}


def responses():
    whole = client.responses.create(model=MODEL, instructions="Be brief.", input="Hello", max_output_tokens=10,
                                    temperature=0)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens", whole
    assert whole.usage.output_tokens == 10
    with client.responses.stream(model=MODEL, instructions="Be brief.", input="Hello", max_output_tokens=10,
                                 temperature=0) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete", kinds
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def messages():
    asked = dict(model=MODEL, max_tokens=10, system="Be brief.", messages=MESSAGES, extra_body={"temperature": 0})
    whole = claude.messages.create(**asked)
    assert whole.type == "message" and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 10, whole
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text and last.usage.output_tokens == 10
    counted = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=MESSAGES)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def embeddings():
    texts = ["the river", "a long road to the sea", "x"]
    # The client asks for base 64 unless it is told otherwise, and decodes it.
    whole = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.index for item in whole.data] == [0, 1, 2] and whole.usage.prompt_tokens == whole.usage.total_tokens > 0
    for one, other in zip(whole.data, plain.data):
        assert len(one.embedding) == len(other.embedding)
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding)) < 1e-7
        assert abs(sum(value * value for value in one.embedding) - 1) < 1e-5
    alone = client.embeddings.create(model=MODEL, input=texts[1], encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(alone, plain.data[1].embedding)) < 1e-5
    mean = client.embeddings.create(model=MODEL, input=texts[1], extra_body={"pooling": "mean"}).data[0].embedding
    assert max(abs(a - b) for a, b in zip(alone, mean)) > 1e-3
    short = client.embeddings.create(model=MODEL, input=texts[1], dimensions=3).data[0].embedding
    norm = sum(value * value for value in alone[:3]) ** 0.5
    assert max(abs(a - b / norm) for a, b in zip(short, alone)) < 1e-5


def expect(kind, call, fragment):
    try:
        call()
    except kind as error:
        assert fragment in str(error), error
    else:
        raise AssertionError(f"no {kind} with {fragment!r}")


def errors():
    create = client.chat.completions.create
    expect(openai.NotFoundError, lambda: create(model="other", messages=MESSAGES), "does not exist")
    expect(openai.BadRequestError, lambda: create(model=MODEL, messages=MESSAGES, temperature=-1), "temperature")
    long = [{"role": "user", "content": "x" * 5000}]
    expect(openai.BadRequestError, lambda: create(model=MODEL, messages=long), "at most 511 fit")
    vectors = client.embeddings.create
    expect(openai.NotFoundError, lambda: vectors(model="other", input="x"), "does not exist")
    expect(openai.BadRequestError, lambda: vectors(model=MODEL, input=[]), "empty list")
    expect(openai.BadRequestError, lambda: vectors(model=MODEL, input="x", dimensions=100_000), "dimensions")
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    expect(openai.AuthenticationError, stranger.models.list, "API key")
    expect(anthropic.NotFoundError, lambda: claude.messages.create(model="other", max_tokens=1, messages=MESSAGES), "not_found")
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    expect(anthropic.AuthenticationError, lambda: stranger.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES), "API key")


for check in (completions, chats, structured, tools, responses, messages, embeddings, errors):
    check()
print(json.dumps(found))
