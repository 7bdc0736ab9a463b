"""Promises of the OpenAI API that no other test shows with the reference client and the real model. The
numbers in names only tell the tests apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import EMBEDDER, MODEL
from tests.support.e2e_stack import ProcessStack
from tests.support.http import call

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

PROMPT = "The capital of France is"
# Longer than a block of KV, and told by no other test.
TALE = "In the orchard behind the mill a fox once taught the miller's geese to count their steps. "


@pytest.fixture
async def client(stack: ProcessStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def complete(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, **fields}
    return await client.completions.create(**body)


async def chat(client: openai.AsyncOpenAI, text: str = "Hi!", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 2, **fields}
    return await client.chat.completions.create(**body)


async def refused(made: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        await made
    return caught.value


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_05_06_unknown_fields_and_no_model(stack: ProcessStack, path: str) -> None:
    model = MODEL if path in list(BODIES)[:3] else EMBEDDER
    for fields, param, code in (
        ({"model": model, "nobody_knows": 1}, "nobody_knows", "unknown_parameter"),
        ({"model": ""}, "model", None),
        ({"model": None}, "model", None),
        ({}, "model", "missing_required_parameter"),
    ):
        answer = await call(stack.address, "POST", path, {**BODIES[path], **fields})
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, param), error
        assert code is None or error["code"] == code


async def test_15_length_only_if_nothing_else_stopped_it(client: openai.AsyncOpenAI) -> None:
    whole = (await complete(client, logprobs=0, max_tokens=5)).choices[0]
    assert (whole.finish_reason, len(whole.logprobs.tokens)) == ("length", 5)
    last = whole.logprobs.tokens[-1]
    assert whole.text.count(last) == 1
    stopped = await complete(client, max_tokens=5, stop=last)
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 5)
    assert stopped.choices[0].text == whole.text[: -len(last)]
    later = await complete(client, max_tokens=4, stop=last)
    assert (later.choices[0].finish_reason, later.usage.completion_tokens) == ("length", 4)


async def test_16_18_19_values_at_the_edges(client: openai.AsyncOpenAI) -> None:
    fine: list[dict[str, Any]] = [
        {"seed": 2**63 - 1, "temperature": 1},
        {"seed": -(2**63 - 1), "temperature": 1},
        {"temperature": 1e-6},
        {"temperature": 2.0, "seed": 1},
        {"top_p": 1.0, "temperature": 1},
        {"extra_body": {"top_k": 0}},
        {"extra_body": {"top_k": -1}},
        {"top_p": 0, "temperature": 1, "seed": 1},
    ]
    answers = await asyncio.gather(*(chat(client, **fields) for fields in fine))
    assert all(answer.usage.completion_tokens for answer in answers)
    greedy = await chat(client)
    for index in (2, 5, 6, 7):
        assert answers[index].choices[0].message.content == greedy.choices[0].message.content
    bad: list[dict[str, Any]] = [{"seed": 2**63}, {"temperature": 2.01}, {"temperature": -0.1}]
    bad += [{"top_p": -0.1}, {"top_p": 1.01}, {"extra_body": {"top_k": -2}}]
    for fields in bad:
        name = next(iter(fields.get("extra_body", fields)))
        assert (await refused(chat(client, **fields))).param == name


async def test_17_greedy_requests_agree_alone_and_in_a_batch(client: openai.AsyncOpenAI) -> None:
    alone = (await complete(client, max_tokens=5)).choices[0].text
    others = [complete(client, f"{number} bottles of", max_tokens=4 + number) for number in range(4)]
    together = await asyncio.gather(*(complete(client, max_tokens=5) for _ in range(8)), *others)
    assert {answer.choices[0].text for answer in together[:8]} == {alone}


async def test_29_30_choices_of_streams(client: openai.AsyncOpenAI) -> None:
    for fields, choices in (
        ({"prompt": [PROMPT] * 2}, 2),
        ({"prompt": "I saw", "n": 3, "temperature": 1.5, "seed": 9}, 3),
    ):
        options = {"max_tokens": 4, "logprobs": 0, **fields}
        whole = await complete(client, **options)
        texts, counts = [""] * choices, [0] * choices
        reasons: list[list[str]] = [[] for _ in range(choices)]
        async for chunk in await complete(client, **options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                counts[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
                reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        assert texts == [choice.text for choice in whole.choices]
        assert len(set(texts)) == (1 if choices == 2 else 3)
        assert (counts, reasons) == ([4] * choices, [["length"]] * choices)


async def test_31_32_33_prompts(client: openai.AsyncOpenAI) -> None:
    for prompt, words in (("", "empty"), ([999_999], "vocabulary"), ([], "empty")):
        error = await refused(complete(client, prompt))
        assert error.param == "prompt"
        assert words in error.message
    assert (await refused(complete(client, suffix="x"))).param == "suffix"
    long = "one two three " * 5
    for keep in (1, 7):
        cut = await complete(client, long, extra_body={"truncate_prompt_tokens": keep})
        assert cut.usage.prompt_tokens == keep
    whole, same = [
        await complete(client, long, extra_body=fields) for fields in ({}, {"truncate_prompt_tokens": -1})
    ]
    assert same.usage.prompt_tokens == whole.usage.prompt_tokens
    error = await refused(complete(client, long, extra_body={"truncate_prompt_tokens": 4000}))
    assert error.param == "truncate_prompt_tokens"


async def test_39_options_of_streams(client: openai.AsyncOpenAI) -> None:
    for options, told in ((None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)):
        fields: dict[str, Any] = {} if options is None else {"stream_options": options}
        chunks = [chunk async for chunk in await chat(client, stream=True, **fields)]
        assert [chunk.usage is not None for chunk in chunks].count(True) == told
        assert [not chunk.choices for chunk in chunks].count(True) == told
    for value in (False, openai.NOT_GIVEN):
        error = await refused(chat(client, stream=value, stream_options={"include_usage": True}))
        assert str(error.param).split(".")[0] == "stream_options"


async def test_41_a_prompt_of_several_steps_makes_no_empty_chunks(client: openai.AsyncOpenAI) -> None:
    """The engine computes 512 tokens a step."""
    made = await chat(
        client,
        "tick tock " * 265,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = [chunk async for chunk in made]
    assert chunks[-1].usage.prompt_tokens > 512
    assert chunks[-1].choices == []
    assert all(chunk.choices for chunk in chunks[:-1])
    entries = [e for c in chunks[:-1] if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * chunks[-1].usage.completion_tokens


async def test_45_bad_response_formats(client: openai.AsyncOpenAI) -> None:
    for value in (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": 123}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema"},
        {"type": 123},
        {"type": "hiccup", "schema": {}},
    ):
        error = await refused(chat(client, response_format=value))
        assert str(error.param).startswith("response_format"), value
        assert error.type == "invalid_request_error"


async def test_c28_a_seed_after_a_hit_of_the_prefix_cache(client: openai.AsyncOpenAI) -> None:
    options = {"prompt": TALE * 3, "seed": 123, "temperature": 0.5, "max_tokens": 8}
    cold, warm = await complete(client, **options), await complete(client, **options)
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    assert warm.choices[0].text == cold.choices[0].text
    pairs = [await complete(client, **options, n=2) for _ in range(2)]
    first, second = [[choice.text for choice in pair.choices] for pair in pairs]
    assert first == second
    assert len(set(first)) == 2
