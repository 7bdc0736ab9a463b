"""Streams of background responses: left, and gone on with from any event."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.http import Connection, call, request_bytes
from tests.support.responses import RESPONSES, checked_event, events_of
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

BODY = {"input": "hi", "background": True, "stream": True}
HELLO = "Hello 世界, how are you?"


async def begun(connection: Connection, count: int) -> list[dict[str, Any]]:
    """The first events of a stream, `count` at least."""
    status, _ = await connection.head()
    assert status == 200
    data = b""
    while data.count(b"\n\n") < count:
        data += await connection.chunk()
    lines = [part.split(b"data: ")[1] for part in data.split(b"\n\n")[:-1]]
    return [checked_event(json.loads(line)) for line in lines]


async def test_a_stream_is_told_again_from_any_event(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying(HELLO), step_delay_ms=5))
    told = events_of(await stack.post(RESPONSES, BODY))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:3]] == [
        *("response.created", "response.queued", "response.in_progress"),
    ]
    assert [event["response"]["status"] for event in told[:3]] == ["queued", "queued", "in_progress"]
    assert "".join(event.get("delta", "") for event in told) == HELLO
    final = told[-1]
    assert final["type"] == "response.completed"
    path = f"{RESPONSES}/{final['response']['id']}"
    assert (await stack.get(path)).json() == final["response"]
    assert events_of(await stack.get(f"{path}?stream=true")) == told
    for after in range(len(told) + 2):
        again = await stack.get(f"{path}?stream=true&starting_after={after}")
        assert events_of(again) == told[after + 1 :]


async def test_the_client_goes_on_with_a_stream_that_it_lost(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying(HELLO), step_delay_ms=15))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        seen: list[Any] = []
        async with await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        ) as first:
            async for event in first:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
        response_id = seen[0].response.id
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        rest = await client.responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == HELLO
    assert seen[-1].type == "response.completed"
    assert seen[-1].response.output_text == HELLO


async def test_any_number_of_readers_at_any_gateway(start_stack: StartStack, run_dir: Path) -> None:
    stack = await start_stack(script(saying(HELLO), step_delay_ms=15), state_dir=run_dir / "state")
    async with stack.another_gateway() as other:
        connection = await stack.open_stream(RESPONSES, BODY)
        first = await begun(connection, 4)
        path = f"{RESPONSES}/{first[0]['response']['id']}?stream=true"
        here, there = await asyncio.gather(stack.get(path), call(other, "GET", f"{path}&starting_after=2"))
        assert events_of(there) == events_of(here)[3:]
        assert events_of(here)[: len(first)] == first
        assert events_of(here)[-1]["response"]["status"] == "completed"
        connection.close()


async def test_a_cut_answer_and_a_failed_one_end_their_streams(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("abc", then="error"), step_delay_ms=5))
    cut = events_of(await stack.post(RESPONSES, {**BODY, "max_output_tokens": 2}))
    assert (cut[-1]["type"], cut[-1]["response"]["status"]) == ("response.incomplete", "incomplete")
    failed = events_of(await stack.post(RESPONSES, BODY))
    assert (failed[-1]["type"], failed[-1]["response"]["error"]["code"]) == (
        *("response.failed", "server_error"),
    )
    path = f"{RESPONSES}/{failed[-1]['response']['id']}"
    assert events_of(await stack.get(f"{path}?stream=true&starting_after=1")) == failed[2:]


async def test_a_gateway_that_ends_ends_its_streams(start_stack: StartStack, run_dir: Path) -> None:
    stack = await start_stack(script(step_delay_ms=20), state_dir=run_dir / "state")
    connection = await stack.open_stream(RESPONSES, BODY)
    first = await begun(connection, 6)
    await stack.restart_gateway()
    connection.close()
    path = f"{RESPONSES}/{first[0]['response']['id']}?stream=true"
    told = events_of(await stack.get(path))
    assert told[: len(first)] == first
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.failed", "failed")


@pytest.mark.parametrize("ends", ["cancel", "delete"])
async def test_the_stream_of_a_response_that_is_cancelled_or_deleted_ends(
    start_stack: StartStack, ends: str
) -> None:
    stack = await start_stack(script(step_delay_ms=20))
    connection = await stack.open_stream(RESPONSES, BODY)
    first = await begun(connection, 6)
    path = f"{RESPONSES}/{first[0]['response']['id']}"
    if ends == "cancel":
        assert (await stack.post(f"{path}/cancel", {})).json()["status"] == "cancelled"
    else:
        await call(stack.address, "DELETE", path)
    while data := await connection.chunk():
        assert b"response.completed" not in data
    again = await stack.get(f"{path}?stream=true")
    if ends == "cancel":
        assert events_of(again)[: len(first)] == first
    else:
        assert again.status == 404
    await stack.idle()


async def test_events_beyond_the_limit_are_dropped_and_the_response_is_not(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("x" * 200), step_delay_ms=2), max_event_mib=0.008)
    last = events_of(await stack.post(RESPONSES, BODY))[-1]
    assert (last["type"], last["code"], last["param"]) == ("error", "events_dropped", "stream")
    assert "0.008 MiB" in last["message"]
    await stack.idle()
    (made,) = await stack.gateway.stored.databases[0].fetch("SELECT id, bytes FROM responses")
    answer = await stack.get(f"{RESPONSES}/{made[0]}?stream=true")
    assert (answer.status, answer.json()["error"]["code"]) == (400, "events_dropped")
    whole = (await stack.get(f"{RESPONSES}/{made[0]}")).json()
    assert whole["output"][0]["content"][0]["text"] == "x" * 200


async def test_what_cannot_be_streamed_later(stack: Stack) -> None:
    made = (await stack.post(RESPONSES, {"input": "hi", "max_output_tokens": 1})).json()
    path = f"{RESPONSES}/{made['id']}"
    for query, param in (
        ("stream=true", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&include_obfuscation=true", "include_obfuscation"),
        ("stream=yes", "stream"),
    ):
        refused = await stack.get(f"{path}?{query}")
        assert (refused.status, refused.json()["error"]["param"]) == (400, param), query
    assert (await stack.get(f"{path}?stream=false&include_obfuscation=false")).json() == made
    assert (await stack.get(f"{RESPONSES}/resp_none?stream=true")).status == 404


async def test_streams_are_bounded_and_take_no_place_of_a_request(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=20), max_event_streams=1, max_requests=1)
    connection = await stack.open_stream(RESPONSES, BODY)
    first = await begun(connection, 5)
    path = f"{RESPONSES}/{first[0]['response']['id']}"
    assert (await stack.get(f"{path}?stream=true")).status == 429
    connection.close()

    await eventually(lambda: stack.gateway.stored.background.streams.open == 0, "a free place")  # type: ignore[union-attr]
    other = await stack.open_raw(request_bytes("GET", f"{path}?stream=true"))
    assert (await begun(other, 5))[:5] == first[:5]
    other.close()
    await call(stack.address, "DELETE", path)
    await eventually(lambda: stack.gateway.upstreams.session.live == 0, "an idle session")
