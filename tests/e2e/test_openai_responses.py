"""Responses and batches of the real models with the reference client (assertion 66)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import EMBEDDER, MODEL
from tests.support.batches import ended, results, started
from tests.support.e2e_stack import ProcessStack


@pytest.fixture
async def client(stack: ProcessStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_response_says_what_a_chat_says(client: openai.AsyncOpenAI) -> None:
    question = "Name the capital of France."
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=12
    )
    made = await client.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=12)
    assert made.output_text == chat.choices[0].message.content
    assert made.usage is not None
    assert chat.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        *(chat.usage.prompt_tokens, chat.usage.completion_tokens),
    )
    deltas, ids, numbers = "", set(), []
    stream = await client.responses.create(
        model=MODEL, input=question, temperature=0, max_output_tokens=12, stream=True
    )
    async for event in stream:
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            deltas += event.delta
        if hasattr(event, "item_id"):
            ids.add(event.item_id)
    assert deltas == made.output_text
    assert len(ids) == 1
    assert ids.pop().startswith("msg_")
    assert numbers == list(range(len(numbers)))
    again = await client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=made.id, temperature=0, max_output_tokens=12
    )
    turns: list[Any] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": made.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    chat = await client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=12)
    assert again.output_text == chat.choices[0].message.content


class City(BaseModel):
    name: str
    large: bool


async def test_a_response_in_the_form_of_a_class(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, temperature=0, max_output_tokens=80
    )
    assert isinstance(made.output_parsed, City)


async def test_a_call_that_is_required(client: openai.AsyncOpenAI) -> None:
    tools: Any = [
        {
            "type": "function",
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            "strict": True,
        }
    ]
    made = await client.responses.create(
        model=MODEL,
        input="Add 1 and 2.",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    call = made.output[0]
    assert call.type == "function_call"
    assert call.name == "add"
    assert set(json.loads(call.arguments)) == {"a", "b"}


async def test_a_batch_of_embeddings(client: openai.AsyncOpenAI) -> None:
    texts = ["a cat", "a dog", "the stock market"]
    url = "/v1/embeddings"
    lines = [
        {"custom_id": text, "method": "POST", "url": url, "body": {"model": EMBEDDER, "input": text}}
        for text in texts
    ]
    batch = await ended(client, await started(client, lines, url))
    assert batch.status == "completed"
    found = await results(client, batch.output_file_id)
    direct = await client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float")
    for text, item in zip(texts, direct.data, strict=True):
        vector = found[text]["response"]["body"]["data"][0]["embedding"]
        assert vector == pytest.approx(item.embedding, abs=1e-4)
