"""What a client refuses before it asks anybody: names and values of options, and messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from catenary import AsyncClient, Client, SamplingParams
from catenary.client.options import GenerateOptions, check_options
from catenary.client.text import chat_input
from catenary.parameters import PARAMETERS, SAMPLING, Numbers, SamplingNumbers
from catenary.v1 import common_pb2
from gateway.schemas.generation import SamplingFields
from services.engine.domain import SamplingOptions

CHAT = [{"role": "user", "content": "hi"}]
CALLS = [("chat", CHAT), ("stream_chat", CHAT), ("complete", "x"), ("stream_complete", "x")]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature must be a finite number of at least 0, not -1"),
    ({"temperature": float("nan")}, "temperature must be"),
    ({"temperature": float("inf")}, "temperature must be"),
    ({"temperature": "0"}, "temperature must be"),
    ({"temperature": True}, "temperature must be"),
    ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k must be an integer of at least -1, not -2"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": -0.1}, "min_p must be a number at least 0 and at most 1"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number at least 0.01 and at most 100"),
    ({"seed": 1 << 63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 31}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"top_logprobs": 21}, "top_logprobs must be an integer at least 0 and at most 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"priority": "high"}, "priority"),
    ({"prompt_len": 0}, "prompt_len"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ({"keep_top_k_duplicates": "no"}, "keep_top_k_duplicates"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping"),
    ({"logit_bias": {"5": 1}}, "an id in logit_bias"),
    ({"logit_bias": {5: 101}}, "a value in logit_bias"),
    ({"allowed_token_ids": [-1]}, "an id in allowed_token_ids"),
    ({"stop_token_ids": 5}, "stop_token_ids must hold token ids"),
    ({"bad_words": ["bad"]}, "bad_words must hold token ids"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"constraint": {"regex": "a"}}, "constraint must be a Constraint"),
    ({"beam_search": 4}, "beam_search must be a BeamSearch"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=str)
def test_a_value_is_refused_when_it_is_given(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_options(options)


def test_what_is_allowed_and_what_is_left_open() -> None:
    check_options(dict.fromkeys(GenerateOptions.__annotations__))
    check_options({"temperature": 3, "top_p": 1, "top_k": -1, "repetition_penalty": 0.01, "seed": -(1 << 63)})
    check_options({"logit_bias": {5: -100}, "bad_words": [[1, 2]], "stop_token_ids": (), "ignore_eos": True})
    check_options({"constraint": common_pb2.Constraint(), "beam_search": common_pb2.BeamSearch(width=2)})


def test_every_option_is_checked() -> None:
    refused = {name for options, _ in WRONG for name in options}
    assert refused == GenerateOptions.__annotations__.keys()
    assert PARAMETERS.keys() <= refused
    assert 1 in Numbers(0, 1)
    assert 10**400 not in Numbers(0, 1)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("n", "")]
)
async def test_an_unknown_option_is_a_type_error_in_every_method(name: str, near: str) -> None:
    text = f"there is no option '{name}'" + (f" .did you mean '{near}'" if near else "")
    options: dict[str, Any] = {name: 1}
    client: Any = AsyncClient("unix:/nowhere", tokenizer="unix:/nowhere")
    for method, subject in CALLS:
        with pytest.raises(TypeError, match=text):
            # Streams too refuse at the call, not when they are first read.
            await getattr(client, method)(subject, model="m", **options)
    with pytest.raises(TypeError, match=text):
        client.generate([1], model="m", **options)
    await client.aclose()


def test_the_client_without_a_loop_refuses_the_same() -> None:
    with Client("unix:/nowhere", tokenizer="unix:/nowhere") as client:
        made: Any = client
        for method, subject in CALLS:
            with pytest.raises(TypeError, match="did you mean 'temperature'"):
                getattr(made, method)(subject, model="m", temprature=0)
            with pytest.raises(ValueError, match="top_p must be"):
                getattr(made, method)(subject, model="m", top_p=2)


def test_messages() -> None:
    assert chat_input("hi") == chat_input(CHAT)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [part.text for part in chat_input([{"role": "user", "content": parts}]).messages[0].content] == [
        "a",
        "b",
    ]
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    answer = chat_input([{"role": "assistant", "content": None, "tool_calls": [call]}]).messages[0]
    assert (answer.tool_calls[0].name, list(answer.content)) == ("f", [])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ({"role": "user", "content": "hi"}, "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*CHAT, {"content": "hi"}], r"messages\[1\] must be an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text"),
        ([{"role": "user", "content": []}], "content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "parts of type text"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tool_calls must be objects"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls must be objects"),
    ],
)
def test_messages_of_another_form_are_a_value_error(messages: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        chat_input(messages)


def test_a_number_of_the_sampler_has_one_name_and_one_default_everywhere() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(SamplingOptions)}
    body = SamplingFields.model_fields
    assert list(SamplingNumbers.__annotations__) == list(SAMPLING)
    for name, one in SAMPLING.items():
        assert fields[name] == one.default
        assert one.default in one.numbers
        assert name in body
        assert name in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        assert name in SamplingParams.__dataclass_fields__
