"""Tool calls of the real model with the reference client.

So small a model calls what it likes: calls are required where one is wanted, and a grammar writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.support.e2e_stack import ProcessStack

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "sign": {"enum": ["+", "\u2212"]}},
    "required": ["a", "sign"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
MESSAGES: list[Any] = [{"role": "user", "content": "What is 17 and 4?"}]


@pytest.fixture
async def client(stack: ProcessStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 120,
        "tools": TOOLS,
        **fields,
    }
    return await client.chat.completions.create(**body)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[tuple[str, str]], str | None]:
    calls: list[tuple[str, str]] = []
    reason = None
    async for chunk in await ask(client, stream=True, **fields):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    calls.append((call.function.name, ""))
                name, arguments = calls[call.index]
                calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return calls, reason


async def test_47_a_named_tool_is_called_alike_in_both_modes(client: openai.AsyncOpenAI) -> None:
    answer, parts = await asyncio.gather(ask(client, tool_choice=NAMED), streamed(client, tool_choice=NAMED))
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("add", "stop", None)
    jsonschema.validate(json.loads(call.function.arguments), ADD)
    assert parts == ([("add", call.function.arguments)], "stop")


async def test_48_bad_choices_are_refused(client: openai.AsyncOpenAI) -> None:
    unknown = {"type": "function", "function": {"name": "nope"}}
    for fields in ({"tool_choice": unknown}, {"tools": [], "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **fields)
        assert caught.value.param == "tool_choice"
    # Asks for nothing, and many clients send it always.
    answer = await ask(client, tools=openai.NOT_GIVEN, tool_choice="auto", max_tokens=4)
    assert answer.choices[0].message.tool_calls is None


async def test_49_51_a_required_call_and_at_most_one(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, tool_choice="required", parallel_tool_calls=False, n=2, temperature=1, seed=5)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert call.function.name in ("add", "now")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "add":
            jsonschema.validate(arguments, ADD)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2


async def test_50_calls_and_results_go_back(client: openai.AsyncOpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    answer = await ask(client, messages=turns, tools=openai.NOT_GIVEN, max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_tools_may_be_called_or_not(client: openai.AsyncOpenAI) -> None:
    """`auto`, as every agent library asks: an answer is text, calls, or both, and goes back as it is."""
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True, "seed": 3, "temperature": 1}):
        answer = await ask(client, **fields)
        (choice,) = answer.choices
        message = choice.message
        calls = message.tool_calls or []
        assert message.content or calls
        assert "<tool_call>" not in (message.content or "")
        assert choice.finish_reason in (("tool_calls", "length") if calls else ("stop", "length"))
        turns: list[Any] = [*MESSAGES, message.model_dump(exclude_none=True)]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in calls]
        again = await ask(client, messages=[*turns, *MESSAGES], max_tokens=4)
        assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


async def test_tools_may_be_called_or_not_elsewhere(client: openai.AsyncOpenAI) -> None:
    """The same streamed, and in responses."""
    calls, reason = await streamed(client, tool_choice="auto")
    assert reason in (("tool_calls", "length") if calls else ("stop", "length"))
    functions: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields: dict[str, Any] = {"model": MODEL, "input": MESSAGES, "tools": functions, "max_output_tokens": 60}
    response = await client.responses.create(**fields)
    assert response.status in ("completed", "incomplete")
    assert {item.type for item in response.output} <= {"message", "function_call"}
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21"}
        for item in response.output
        if item.type == "function_call"
    ]
    fields |= {"input": [*results, *MESSAGES], "previous_response_id": response.id, "max_output_tokens": 4}
    again = await client.responses.create(**fields)
    assert again.status in ("completed", "incomplete")


async def test_a_cut_call_goes_back(client: openai.AsyncOpenAI) -> None:
    """What the service wrote it takes, in both APIs."""
    cut = await ask(client, tool_choice=NAMED, max_tokens=22)
    (call,) = cut.choices[0].message.tool_calls
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
        json.loads(call.function.arguments)
    message = cut.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "error: arguments were no JSON"}
    answer = await ask(client, messages=[*MESSAGES, message, result], max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length")
    function = {"call_id": call.id, "name": call.function.name, "arguments": call.function.arguments}
    items: list[Any] = [
        *MESSAGES,
        {"type": "function_call", **function},
        {"type": "function_call_output", "call_id": call.id, "output": "error: arguments were no JSON"},
    ]
    response = await client.responses.create(model=MODEL, input=items, max_output_tokens=4)
    assert response.status in ("completed", "incomplete")
    deep = "[" * 200 + "]" * 200
    items[1] = {"type": "function_call", **function, "arguments": deep}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input=items, max_output_tokens=4)
    assert caught.value.param == "input.1.arguments"
