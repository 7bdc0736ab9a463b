"""`/v1/responses` as the reference client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus
from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.http import Answer, call
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

HELLO = "Hello 世界"


@pytest.fixture
async def hello(start_stack: StartStack) -> Stack:
    """A gateway whose model says the same to everything."""
    return await start_stack(script(saying(HELLO), step_delay_ms=1))


@pytest.fixture
async def client(hello: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """Its client."""
    async with openai.AsyncOpenAI(base_url=f"{hello.address}/v1", api_key="k", max_retries=0) as client:
        yield client


async def test_a_response(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="hi", metadata={"a": "b"}, temperature=0.5)
    assert made.output_text == HELLO
    assert made.id.startswith("resp_")
    assert (made.status, made.object, made.error, made.incomplete_details) == (
        *("completed", "response", None, None),
    )
    assert str(made.output[0].id).startswith("msg_")
    assert (made.metadata, made.temperature, made.top_p) == ({"a": "b"}, 0.5, 1.0)
    told = made.model_dump()
    assert (told["presence_penalty"], told["frequency_penalty"]) == (0.0, 0.0)
    # C12
    usage = made.usage
    assert usage is not None
    assert usage.input_tokens > 0
    assert usage.output_tokens == len(HELLO.encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_the_stream_is_the_whole_response_in_order(hello: Stack) -> None:
    whole = (await hello.post(RESPONSES, {"input": "hi", "store": False})).json()
    answer = await hello.post(RESPONSES, {"input": "hi", "store": False, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    inside = [event for event in events if "item_id" in event]
    item = events[-2]["item"]
    assert {event["item_id"] for event in inside} == {item["id"]}
    assert {event["output_index"] for event in [*inside, events[2], events[-2]]} == {0}
    assert "".join(event.get("delta", "") for event in events) == HELLO == item["content"][0]["text"]
    last = events[-1]["response"]
    assert last["output"] == [item]
    assert last["usage"] == whole["usage"]
    assert [part["content"] for part in last["output"]] == [part["content"] for part in whole["output"]]
    assert {event["response"]["id"] for event in (events[0], events[1])} == {last["id"]}
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


async def test_a_cut_response_is_incomplete(hello: Stack) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    for made in (
        (await hello.post(RESPONSES, body)).json(),
        events_of(await hello.post(RESPONSES, {**body, "stream": True}))[-1]["response"],
    ):
        assert made["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert made["output"][0]["status"] == "incomplete"
        assert made["output"][0]["content"][0]["text"] == HELLO[:3]


async def test_the_life_of_a_stored_response(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one", instructions="be brief")
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.instructions is None
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    same = await client.responses.retrieve(first.id)
    assert same == first
    items: Any = await client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["two"]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as broken:
        await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    assert broken.value.param == "previous_response_id"
    assert broken.value.code == "previous_response_not_found"


async def test_what_is_gone_on_from_is_what_was_said(hello: Stack) -> None:
    first = (await hello.post(RESPONSES, {"input": "one", "instructions": "not inherited"})).json()
    counted = await hello.post(
        f"{RESPONSES}/input_tokens", {"input": "two", "previous_response_id": first["id"]}
    )
    sent = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": HELLO},
        {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ]
    whole = await hello.post(f"{RESPONSES}/input_tokens", {"input": sent})
    assert counted.json() == whole.json()
    assert whole.json()["object"] == "response.input_tokens"
    chat = await hello.post(
        "/v1/chat/completions", {"messages": [*sent[:2], {"role": "user", "content": "two"}]}
    )
    assert chat.json()["usage"]["prompt_tokens"] == whole.json()["input_tokens"]


async def test_answers_are_of_openais_types(hello: Stack) -> None:
    sent = [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}]
    body = {"input": sent, "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "none"}}
    made = await hello.post(RESPONSES, body)
    parsed = Response.model_validate(made.json())
    assert parsed.to_dict() == made.json()
    assert (await hello.get(f"{RESPONSES}/{parsed.id}")).json() == made.json()
    listed = await hello.get(f"{RESPONSES}/{parsed.id}/input_items")
    ResponseItemList.model_validate(listed.json())
    assert set(hello_schema(await hello.get("/openapi.json"))) >= {"input", "previous_response_id", "top_k"}


def hello_schema(answer: Answer) -> dict[str, Any]:
    body = answer.json()["paths"][RESPONSES]["post"]["requestBody"]["content"]["application/json"]
    found: dict[str, Any] = body["schema"]["properties"]
    return found


async def test_a_client_that_hangs_up_leaves_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5), max_stored_responses=5)
    for fields in ({"stream": True}, {}):
        connection = await stack.open_stream(RESPONSES, {"input": "x", **fields})
        await eventually(lambda: stack.gateway.upstreams.session.live == 1, "a sequence at work")
        connection.close()
        await stack.idle()
    assert stack.gateway.stored.store is not None
    assert await stack.gateway.stored.store.jobs.renew("nobody", ["x"]) == {}


async def test_a_restart_ends_background_responses_and_keeps_the_rest(
    start_stack: StartStack, run_dir: Path
) -> None:
    stack = await start_stack(script(step_delay_ms=20), state_dir=run_dir / "state")
    done = (await stack.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})).json()
    running = (await stack.post(RESPONSES, {"input": "hi", "background": True})).json()
    await eventually(lambda: stack.gateway.upstreams.session.live == 1, "a response at work")
    await stack.restart_gateway()
    assert (await stack.get(f"{RESPONSES}/{done['id']}")).json() == done
    ended = (await stack.get(f"{RESPONSES}/{running['id']}")).json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")


async def test_gateways_that_share_a_directory(start_stack: StartStack, run_dir: Path) -> None:
    stack = await start_stack(script(step_delay_ms=20), state_dir=run_dir / "state")
    async with stack.another_gateway() as other:
        made = (await stack.post(RESPONSES, {"input": "hi", "background": True})).json()
        path = f"{RESPONSES}/{made['id']}"
        seen = made
        while seen["status"] == "queued":
            await asyncio.sleep(0.02)
            seen = (await call(other, "GET", path)).json()
        assert seen["status"] == "in_progress"
        assert (await call(other, "POST", f"{path}/cancel", {})).json()["status"] == "cancelled"
        await stack.idle()
        assert (await stack.get(path)).json()["status"] == "cancelled"


async def test_a_gateway_that_stores_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(store_responses=False, batches=False)
    made = await stack.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})
    assert made.json()["store"] is False
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_x"}):
        refused = await stack.post(RESPONSES, {"input": "hi", **fields})
        assert (refused.status, refused.json()["error"]["param"]) == (400, *fields)
    assert (await stack.get(f"{RESPONSES}/{made.json()['id']}")).status == 404
    assert (await stack.get("/v1/files")).status == 404


async def test_store_false_is_not_stored(hello: Stack) -> None:
    made = (await hello.post(RESPONSES, {"input": "hi", "store": False})).json()
    assert made["store"] is False
    assert (await hello.get(f"{RESPONSES}/{made['id']}")).status == 404


async def test_input_items_in_pages(client: openai.AsyncOpenAI) -> None:
    sent: list[Any] = [{"role": "user", "content": f"m{index}"} for index in range(5)]
    made = await client.responses.create(model=MODEL, input=sent)
    orders: list[tuple[Any, range]] = [("asc", range(5)), ("desc", range(4, -1, -1))]
    for order, expected in orders:
        pages: Any = client.responses.input_items.list(made.id, order=order, limit=2)
        found = [item.content[0].text async for item in pages]
        assert found == [f"m{index}" for index in expected]


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    made: Any = await client.responses.create(
        model=MODEL, input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    entries = made.output[0].content[0].logprobs
    assert bytes(value for entry in entries for value in entry.bytes).decode() == HELLO
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_a_background_response(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="hi", background=True)
    assert made.status == "queued"
    while made.status in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        made = await client.responses.retrieve(made.id)
    assert made.status == "completed"
    assert made.output_text == HELLO
    assert (await client.responses.cancel(made.id)).status == "completed"


async def test_a_background_response_is_cancelled(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=20))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
        while made.status != "in_progress":
            await asyncio.sleep(0.02)
            made = await client.responses.retrieve(made.id)
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        await stack.idle()
        assert (await client.responses.retrieve(made.id)).status == "cancelled"
        whole = await client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(whole.id)
        gone = await client.responses.create(model=MODEL, input="hi", background=True)
        await client.responses.delete(gone.id)
    await stack.idle()


async def test_background_responses_that_come_together_keep_to_their_number(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=50), max_background=2)
    body = {"input": "hi", "background": True}
    answers = await asyncio.gather(*(stack.post(RESPONSES, body) for _ in range(24)))
    assert sorted(answer.status for answer in answers) == [200] * 2 + [429] * 22
    for answer in answers:
        if answer.status == 200:
            await call(stack.address, "DELETE", f"{RESPONSES}/{answer.json()['id']}")


async def test_an_engine_that_fails(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("abc", then="error"), step_delay_ms=10))
    events = events_of(await stack.post(RESPONSES, {"input": "hi", "stream": True}))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    stored = (await stack.get(f"{RESPONSES}/{last['response']['id']}")).json()
    assert stored == last["response"]
    goes_on = await stack.post(RESPONSES, {"input": "x", "previous_response_id": stored["id"]})
    assert (goes_on.status, goes_on.json()["error"]["param"]) == (400, "previous_response_id")


async def test_one_key_never_sees_what_belongs_to_another(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=("a", "b"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
    made = (await stack.post(RESPONSES, {"input": "hi", "max_output_tokens": 2}, mine)).json()
    path = f"{RESPONSES}/{made['id']}"
    assert (await stack.get(path, mine)).status == 200
    assert (await stack.get(path, theirs)).status == 404
    assert (await stack.get(f"{path}/input_items", theirs)).status == 404
    assert (await stack.post(f"{path}/cancel", {}, theirs)).status == 404
    goes_on = await stack.post(RESPONSES, {"input": "x", "previous_response_id": made["id"]}, theirs)
    assert goes_on.status == 400
    counted = f"{RESPONSES}/input_tokens"
    goes_on = await stack.post(counted, {"input": "x", "previous_response_id": made["id"]}, theirs)
    assert goes_on.status == 400
    assert (await stack.get(path, mine)).json() == made


async def test_a_store_that_refuses_for_a_while_loses_no_background_response(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await start_stack(script(saying(HELLO)))
    store, refused = stack.gateway.stored.store, []
    assert store is not None
    update = store.update

    async def now_and_then(response_id: str, status: ResponseStatus, *rest: Any) -> bool:
        refused.append(status)
        # Once when it is at work, three times when it has ended.
        if len(refused) <= 4:
            raise ApiError(507, "full", code="disk_full")
        return await update(response_id, status, *rest)

    monkeypatch.setattr(store, "update", now_and_then)
    made = (await stack.post(RESPONSES, {"input": "hi", "background": True, "stream": False})).json()
    path = f"{RESPONSES}/{made['id']}"
    while made["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        made = (await stack.get(path)).json()
    assert (made["status"], made["output"][0]["content"][0]["text"]) == ("completed", HELLO)
    assert refused == [ResponseStatus.IN_PROGRESS, *[ResponseStatus.COMPLETED] * 4]
