"""Prompts over HTTP with the real model: the ids of transformers, and chats that go on with a message."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI

from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
TEXTS = ["", "Hello, world!", "naïve 日本 🙂", "  a\n\n b\t", "<|im_end|> x <|endoftext|>", "word " * 300]
ROUND_TRIP: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Z"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "7 °C"},
]


@pytest.fixture
def client(stack: ProcessStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def post(client: OpenAI, path: str, **body: Any) -> Any:
    return client.post(path, cast_to=object, body={"model": MODEL, **body})


def chat_ids(reference: Reference, messages: Any, **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, "sanitize_control_tokens": True} | options
    return list(reference.tokenizer.apply_chat_template(messages, return_dict=False, **options))


def test_texts_are_tokenized_as_by_transformers(client: OpenAI, reference: Reference) -> None:
    tokenizer = reference.tokenizer
    for text in TEXTS:
        for add in (True, False):
            answer = post(client, "/tokenize", prompt=text, add_special_tokens=add, return_token_strs=True)
            assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=add)
            assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
        assert post(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_chats_are_tokenized_as_by_transformers(client: OpenAI, reference: Reference) -> None:
    draw = random.Random(3)
    for _ in range(30):
        roles = draw.choices(("system", "user", "assistant", "tool"), k=draw.randint(1, 5))
        messages = [{"role": role, "content": draw.choice(TEXTS)} for role in roles]
        expected = chat_ids(reference, messages)
        sent = [
            {**message, "tool_call_id": "c"} if message["role"] == "tool" else message for message in messages
        ]
        assert post(client, "/tokenize", messages=sent)["tokens"] == expected
        assert post(client, "/chat/completions/render", messages=sent)["token_ids"] == expected
        bare = chat_ids(reference, messages, add_generation_prompt=False)
        assert post(client, "/tokenize", messages=sent, add_generation_prompt=False)["tokens"] == bare


def test_usage_counts_the_tokens_of_the_prompt(client: OpenAI) -> None:
    conversations: list[Any] = [
        ROUND_TRIP,
        ROUND_TRIP[:2],
        [{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
    ]
    for messages in conversations:
        usage = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens == post(client, "/tokenize", messages=messages)["count"]
        assert usage.total_tokens == usage.prompt_tokens + 1


def test_forms_of_content_and_developer(client: OpenAI) -> None:
    def ids(role: str, content: Any) -> Any:
        return post(client, "/tokenize", messages=[{"role": role, "content": content}])["tokens"]

    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert ids("system", "Be brief.") == ids("system", parts) == ids("developer", parts)


def test_the_reply_goes_on_with_the_last_message(client: OpenAI, reference: Reference) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    prompt = chat_ids(reference, messages, add_generation_prompt=False, continue_final_message=True)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == reference.text(reference.greedy(prompt, 8))
    assert "Paris" in str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        (
            {"messages": ROUND_TRIP, "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs.tokenize",
        ),
        ({"messages": ROUND_TRIP, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": ROUND_TRIP, "documents": [{"text": "x"}]}, "documents"),
        ({"messages": ROUND_TRIP, "reasoning_effort": "highest"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_rendered_is_named(client: OpenAI, body: dict[str, Any], param: str) -> None:
    for path in ("/chat/completions", "/tokenize"):
        with pytest.raises(openai.BadRequestError) as caught:
            post(client, path, **body)
        assert caught.value.param == param
