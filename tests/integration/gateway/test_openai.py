"""The reference client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.stack_fixtures import StartStack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway without rules."""
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


async def test_chat_and_completions(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, seed=3)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=20,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    completion = await client.completions.create(model=MODEL, prompt="x", max_tokens=5, logprobs=2, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1]
    logprobs: Any = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 5


async def test_models_and_errors(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=-1, stream=True)
    assert bad.value.param == "max_tokens"


async def test_an_error_in_a_stream_is_raised(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("abc", then="error"), step_delay_ms=10))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        texts: list[str] = []
        with pytest.raises(openai.APIError):
            await read_into(texts, stream)
        assert "".join(texts) == "abc"


async def read_into(texts: list[str], stream: openai.AsyncStream[Any]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].text)


async def test_eight_at_a_time(client: openai.AsyncOpenAI) -> None:
    async def one(number: int) -> str:
        answer = await client.completions.create(model=MODEL, prompt=f"p{number}", max_tokens=50, seed=number)
        return answer.choices[0].text

    together = await asyncio.gather(*(one(number) for number in range(8)))
    assert together == [await one(number) for number in range(8)]


async def test_leaving_a_stream_aborts_it(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=900, stream=True)
        async for _ in stream:
            break
        await stream.close()
    await stack.idle()
