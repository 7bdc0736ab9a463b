"""What a response is asked about: references to stored items, and long conversations that are cut."""

from __future__ import annotations

import openai
import pytest

from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.responses import RESPONSES
from tests.support.stack_fixtures import StartStack

USER = {"role": "user", "content": "a"}
COUNT = f"{RESPONSES}/input_tokens"
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "r"}


@pytest.fixture
async def hello(start_stack: StartStack) -> Stack:
    return await start_stack(script(saying("Hello")))


async def tokens(stack: Stack, **fields: object) -> int:
    answer = await stack.post(COUNT, fields)
    assert answer.status == 200, answer.body
    count: int = answer.json()["input_tokens"]
    return count


async def test_references_are_what_they_refer_to(hello: Stack) -> None:
    sent = [{"role": "user", "content": "one", "id": "msg_mine"}, CALL, RESULT]
    async with openai.AsyncOpenAI(base_url=f"{hello.address}/v1", api_key="k", max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input=sent)  # type: ignore[arg-type]
        stored = [item.id async for item in client.responses.input_items.list(first.id, order="asc")]
        assert stored[0] == "msg_mine"
        ids = [*stored, first.output[0].id]
        end = {"role": "user", "content": "two"}
        by_reference = [*({"type": "item_reference", "id": item_id} for item_id in ids), end]
        second = await client.responses.create(model=MODEL, input=by_reference)  # type: ignore[arg-type]
        spelled = await client.responses.create(
            model=MODEL,
            input=[*sent, {"role": "assistant", "content": "Hello"}, end],  # type: ignore[list-item]
        )
        assert second.usage == spelled.usage
        again = [item.id async for item in client.responses.input_items.list(second.id, order="asc")]
        assert again[:-1] == ids
        # The first one is needed no longer, and an id alone is enough.
        await client.responses.delete(first.id)
    assert await tokens(hello, input=[{"id": ids[0]}, *sent[1:]]) == await tokens(hello, input=sent)


async def test_items_that_are_not_there_are_named(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("Hello")), api_key=("a", "b"), max_item_references=2)
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
    made = (await stack.post(RESPONSES, {"input": "x"}, mine)).json()
    kept = {"type": "item_reference", "id": made["output"][0]["id"]}
    user = {"role": "user", "content": "x"}
    for headers, given, param, code in (
        (theirs, [user, kept], "input.1", "item_not_found"),
        (mine, [kept, {"type": "item_reference", "id": "msg_none"}], "input.1", "item_not_found"),
        (mine, [kept, kept, kept, user], "input", "invalid_value"),
    ):
        refused = await stack.post(RESPONSES, {"input": given}, headers)
        error = refused.json()["error"]
        assert (refused.status, error["param"], error["code"]) == (400, param, code)
    assert (await stack.post(RESPONSES, {"input": [kept, kept, user]}, mine)).status == 200


async def test_referenced_items_are_bounded_together(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("Hello")), max_body_mib=0.01)
    made = await stack.post(RESPONSES, {"input": [{"role": "user", "content": "x" * 900, "id": "m"}] * 1})
    assert made.status == 200
    refused = await stack.post(RESPONSES, {"input": [{"id": "m"}] * 20})
    # The same item counts once in what is read; the prompt is too long all the same.
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    for number in range(12):
        long = {"role": "user", "content": "x" * 900, "id": f"m{number}"}
        assert (await stack.post(RESPONSES, {"input": [long]})).status == 200
    refused = await stack.post(RESPONSES, {"input": [{"id": f"m{number}"} for number in range(12)]})
    error = refused.json()["error"]
    assert (refused.status, error["param"]) == (400, "input")
    assert "0.01 MiB" in error["message"]


async def test_a_gateway_without_a_store_has_no_items(start_stack: StartStack) -> None:
    stack = await start_stack(store_responses=False, batches=False)
    refused = await stack.post(RESPONSES, {"input": [{"type": "item_reference", "id": "msg_x"}]})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "item_not_found")


async def test_the_oldest_turns_are_left_out_until_it_fits(hello: Stack) -> None:
    def turn(number: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"{number}" * 90},
            {**CALL, "call_id": f"c{number}"},
            {**RESULT, "call_id": f"c{number}"},
            {"role": "assistant", "content": f"{number}" * 90},
        ]

    question = {"role": "user", "content": "and?"}
    turns = [item for number in range(1, 8) for item in turn(number)]
    body = {"instructions": "be brief", "input": [*turns, question], "max_output_tokens": 200}
    refused = await hello.post(RESPONSES, body)
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    made = await hello.post(RESPONSES, {**body, "truncation": "auto"})
    assert made.status == 200, made.body
    used = made.json()["usage"]["input_tokens"]
    assert used + 200 <= 1024
    assert made.json()["truncation"] == "auto"
    sizes = [
        await tokens(hello, **{**body, "input": [*turns[4 * gone :], question], "max_output_tokens": 1})
        for gone in range(8)
        if gone > 3
    ]
    assert used == max(size for size in sizes if size + 200 <= 1024)
    assert await tokens(hello, **body, truncation="auto") == used
    items = (await hello.get(f"{RESPONSES}/{made.json()['id']}/input_items?limit=100")).json()
    assert len(items["data"]) == len(turns) + 1, "what is left out of the prompt stays in the conversation"


async def test_what_cannot_be_left_out_is_refused_as_without(hello: Stack) -> None:
    long = "x" * 1100
    for given in (
        [{"role": "user", "content": long}],
        [
            {"role": "user", "content": "a"},
            {"role": "developer", "content": long},
            {"role": "user", "content": "b"},
        ],
    ):
        refused = await hello.post(RESPONSES, {"input": given, "truncation": "auto"})
        error = refused.json()["error"]
        assert (refused.status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    short = await hello.post(RESPONSES, {"input": "hi", "truncation": "auto", "max_output_tokens": 2000})
    assert short.json()["error"]["code"] == "context_length_exceeded"
