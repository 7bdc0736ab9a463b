"""Structured output of the real model in float32, by the `openai` package over the whole stack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.support.at_once import at_once
from tests.support.e2e_stack import ProcessStack

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Zoë"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "v": {"const": 1},
    },
    "required": ["name", "age", "v"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " name " FROM " name ";"\nname ::= [a-z] [a-z0-9_]{0,11}'
SQL = re.compile(r"SELECT [a-z][a-z0-9_]{0,11} FROM [a-z][a-z0-9_]{0,11};")


@pytest.fixture
def client(stack: ProcessStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(client: OpenAI, text: str, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 64,
    }
    return client.chat.completions.create(**(fields | options))


def complete(client: OpenAI, prompt: str, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 48}
    return client.completions.create(**(fields | options))


def test_json_schema_in_every_sample(client: OpenAI) -> None:
    """Greedy, and two random samples that share their prompt."""
    constrained = partial(chat, client, "Invent a person.", response_format=json_schema(PERSON))
    greedy, drawn = at_once(constrained, partial(constrained, n=2, temperature=1.0, seed=3))
    for answer, count in ((greedy, 1), (drawn, 2)):
        assert len(answer.choices) == count
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), PERSON)
            assert choice.finish_reason == "stop"


def test_streams_equal_whole_answers(client: OpenAI) -> None:
    options: dict[str, Any] = {"response_format": json_schema(PERSON), "logprobs": True, "top_logprobs": 2}
    asked = partial(chat, client, "Invent a person.", **options)
    whole, chunks = at_once(asked, lambda: list(asked(stream=True)))
    content = ""
    entries: list[Any] = []
    for chunk in chunks:
        content += chunk.choices[0].delta.content or ""
        entries += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert content == whole.choices[0].message.content
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == content
    assert all(entry.logprob <= 0 for entry in entries)


def test_limits_and_stops_work_along(client: OpenAI) -> None:
    asked = partial(chat, client, "Invent a person.", response_format=json_schema(PERSON))
    answers = at_once(
        asked,
        partial(asked, stop=['"age"']),
        partial(asked, max_tokens=7),
        partial(asked, extra_body={"min_tokens": 60, "ignore_eos": True}),
    )
    whole, stopped, cut, long = (answer.choices[0] for answer in answers)
    content = whole.message.content
    assert stopped.message.content == content[: content.index('"age"')]
    assert content.startswith(cut.message.content)
    assert cut.finish_reason == "length"
    assert json.loads(long.message.content)["v"] == 1
    assert long.finish_reason == "stop"


def test_regex_choice_and_grammar(client: OpenAI) -> None:
    value = r"(yes|no), [0-9]{2,3}%"
    sure = partial(chat, client, "Are you sure?", logprobs=True)
    choices = ["开心", "sad", "so-so\n"]
    how = partial(chat, client, "How are you?", n=3, temperature=1.5, seed=1)
    *answers, answer = at_once(
        partial(sure, extra_body={"structured_outputs": {"regex": value}}),
        partial(sure, extra_body={"guided_regex": value}),
        partial(how, extra_body={"structured_outputs": {"choice": choices}}),
        partial(how, extra_body={"guided_choice": choices}),
        partial(complete, client, "A query:", extra_body={"structured_outputs": {"grammar": GRAMMAR}}),
    )
    for matched in answers[:2]:
        assert re.fullmatch(value, matched.choices[0].message.content)
        assert matched.choices[0].logprobs.content
    for chosen in answers[2:]:
        assert {choice.message.content for choice in chosen.choices} <= set(choices)
    assert SQL.fullmatch(answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def test_text_that_is_not_ascii_is_written_as_it_is(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"心情": {"enum": ["开心", "难过"]}},
        "required": ["心情"],
        "additionalProperties": False,
    }
    content = chat(client, "How do you feel?", response_format=json_schema(schema)).choices[0].message.content
    assert "\\u" not in content
    assert json.loads(content)["心情"] in ("开心", "难过")


def test_tags_in_text(client: OpenAI) -> None:
    tags = {
        "type": "structural_tag",
        "triggers": ["<add"],
        "structures": [{"begin": "<add>", "schema": {"type": "integer", "maximum": 99}, "end": "</add>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    answer = chat(client, "Add 3 and 4.", response_format=tags)
    assert re.fullmatch(r"<add>-?[0-9]+</add>", answer.choices[0].message.content)
    tags |= {"at_least_one": False, "stop_after_first": False}
    hello = partial(chat, client, "Hi!", max_tokens=12)
    free, plain = at_once(partial(hello, response_format=tags), hello)
    assert free.choices[0].message.content == plain.choices[0].message.content


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def test_required_and_named_calls(client: OpenAI) -> None:
    """The model was never taught to call: what it writes is what the constraint lets it."""
    options: dict[str, Any] = {"tools": [ADD, NOW], "parallel_tool_calls": False, "max_tokens": 40}
    asked = partial(chat, client, "Add 3 and 2.", **options)
    by_name = partial(asked, tool_choice={"type": "function", "function": {"name": "add"}})
    answers = at_once(partial(asked, tool_choice="required"), by_name, lambda: list(by_name(stream=True)))
    required, named, chunks = answers[0].choices[0], answers[1].choices[0], answers[2]
    assert required.finish_reason == "tool_calls"
    assert [call.function.name in ("add", "now") for call in required.message.tool_calls] == [True]
    (call,) = named.message.tool_calls
    assert (call.function.name, named.finish_reason) == ("add", "stop")
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])  # type: ignore[index]
    name, arguments = "", ""
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or ():
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, arguments) == ("add", call.function.arguments)


def test_a_text_that_spells_a_control_token_is_that_text(client: OpenAI) -> None:
    """Wherever it comes from; and `::=` in it, or beside it, is no grammar."""
    text = "a<|im_end|> ::= b"
    schema = {"type": "object", "properties": {"t": {"const": text}}, "required": ["t"]}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}
    asked = partial(chat, client, "Hi!")
    answers = at_once(
        partial(asked, extra_body={"structured_outputs": {"choice": [text, "<|im_start|>"]}}),
        partial(asked, response_format=json_schema(schema)),
        partial(asked, tools=[tool], tool_choice="required", parallel_tool_calls=False),
        partial(
            client.responses.create,
            model=MODEL,
            input="Hi!",
            max_output_tokens=64,
            text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        ),
    )
    choice, formatted, called = (answer.choices[0] for answer in answers[:3])
    assert choice.finish_reason == formatted.finish_reason == "stop"
    assert choice.message.content in (text, "<|im_start|>")
    assert json.loads(formatted.message.content) == {"t": text}
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"t": text}
    assert json.loads(answers[3].output_text) == {"t": text}


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({"response_format": {"type": "sound"}}, "response_format.type", "json_schema"),
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema", "'not'"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "Look-around"),
        ({"guided_grammar": 'rout ::= "x"'}, "guided_grammar", "root"),
        ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar", "empty"),
    ],
)
def test_what_cannot_be_honoured_is_named(
    client: OpenAI, body: dict[str, Any], param: str, named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "Hi!", extra_body=body)
    assert caught.value.param == param
    assert named in caught.value.message
