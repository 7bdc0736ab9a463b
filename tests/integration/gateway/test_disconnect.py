"""A client that goes away, or stays and does not read: nothing is left behind, whatever the stage."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, Stack, saying, script
from tests.support.http import Connection, request_bytes
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

LONG = {"max_tokens": 900}
ENDLESS = {"max_model_len": 100_000}
ROOMY = {"total_blocks": 40_000}


def stop_reading(connection: Connection) -> None:
    """Read nothing more; what is sent fills small buffers."""
    transport = connection.writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


def engine_load(stack: Stack) -> tuple[int, int]:
    """Running and waiting in the engine."""
    load = stack.engine.app.frontend.load()
    return load.running, load.waiting


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_hang_up_during_decode(start_stack: StartStack, path: str, n: int, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=5))
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    connection = await stack.open_stream(path, {**prompt, **LONG, "n": n, "stream": stream})
    await eventually(lambda: engine_load(stack)[0] == n, "running sequences")
    if stream:
        assert (await connection.head())[0] == 200
    connection.close()
    async with asyncio.timeout(4):
        await stack.idle()
    page = (await stack.get("/metrics")).body.decode()
    assert f'route="{path}",status="{200 if stream else 499}"' in page
    assert 'status="500"' not in page
    assert f'vllm:request_success_total{{finished_reason="abort",model_name="tiny"}} {n}.0' in page
    assert "catenary_gateway_live_sequences 0.0" in page


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_while_queued(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=5, capacity={"max_running": 1}))
    first = await stack.open_stream(COMPLETIONS, {"prompt": "x", **LONG, "stream": True})
    await eventually(lambda: engine_load(stack)[0] == 1, "a running sequence")
    second = await stack.open_stream(COMPLETIONS, {"prompt": "y", **LONG, "stream": stream})
    await eventually(lambda: engine_load(stack) == (1, 1), "a queued sequence")
    second.close()
    await eventually(lambda: engine_load(stack) == (1, 0), "an empty queue", timeout_s=2)
    first.close()
    await stack.idle()
    page = (await stack.get("/metrics")).body.decode()
    assert 'request_success_total{finished_reason="abort",model_name="tiny"} 2.0' in page
    # Of the second request no engine had computed anything: it counts neither here nor there.
    for prefix in ("catenary_", "vllm:"):
        assert f'{prefix}prompt_tokens_total{{model_name="tiny"}} 1.0' in page
        assert f'{prefix}request_prompt_tokens_sum{{model_name="tiny"}} 1.0' in page
        assert f'{prefix}request_prompt_tokens_count{{model_name="tiny"}} 1.0' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_during_prefill(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=50, capacity={"max_batched_tokens": 16}))
    connection = await stack.open_stream(
        COMPLETIONS, {"prompt": [7] * 1000, "max_tokens": 20, "stream": stream}
    )
    await eventually(
        lambda: stack.engine.app.frontend.load().pending_prefill_tokens > 100, "a prefill under way"
    )
    connection.close()
    async with asyncio.timeout(2):
        await stack.idle()


async def test_hang_up_during_rendering(start_stack: StartStack) -> None:
    stack = await start_stack(script(model={"max_model_len": 4_000_000}), max_body_mib=64)
    busy = stack.gateway.upstreams.tokenizers.targets.all[0]
    fields = {"prompt": ["\u00e9 word" * 200_000] * 4, **LONG}
    connections = [await stack.open_stream(COMPLETIONS, fields) for _ in range(3)]
    await eventually(lambda: busy.live == 3, "three renders under way")
    for connection in connections:
        connection.close()
    await eventually(lambda: busy.live == 0, "no render under way", timeout_s=2)
    await stack.idle()
    await eventually(lambda: len(stack.gateway.requests) == 0, "an idle gateway")


async def test_hang_up_between_head_and_body(stack: Stack) -> None:
    whole = request_bytes("POST", COMPLETIONS, {"model": "tiny", "prompt": "x", **LONG})
    for size in (10, len(whole) - 5):
        connection = await stack.open_raw(whole[:size])
        connection.close()
    await stack.alive()


async def test_finished_but_unread(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("short")))
    connection = await stack.open_stream(COMPLETIONS, {"prompt": "x", "stream": True})
    await stack.idle()
    connection.close()
    await stack.alive()


async def test_a_pipelined_request_does_not_hide_the_hang_up(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5))
    one = request_bytes("POST", COMPLETIONS, {"model": "tiny", "prompt": "x", **LONG})
    connection = await stack.open_raw(one + one)
    await eventually(lambda: engine_load(stack)[0] == 1, "a running sequence")
    connection.close()
    async with asyncio.timeout(2):
        await stack.idle()


async def test_a_storm_of_hang_ups(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=2))

    async def one(number: int) -> None:
        connection = await stack.open_stream(
            CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True}
        )
        if number % 3:
            await asyncio.wait_for(connection.head(), 20)
        connection.close()

    await asyncio.gather(*(one(number) for number in range(100)))
    await stack.alive()


async def test_a_client_that_never_reads_is_dropped(start_stack: StartStack) -> None:
    stack = await start_stack(script(model=ENDLESS, capacity=ROOMY), stalled_client_s=0.5)
    fields = {"max_tokens": 90_000, "n": 4, "stream": True, "logprobs": 5, "prompt": [8]}
    connection = await stack.open_stream(COMPLETIONS, fields)
    stop_reading(connection)
    await eventually(lambda: engine_load(stack)[0] == 4, "running sequences")
    neighbour = asyncio.create_task(stack.complete("x", max_tokens=200, seed=1))
    assert (await neighbour).status == 200
    await eventually(lambda: engine_load(stack) == (0, 0), "an idle engine", timeout_s=20)
    assert 'request_failures_total{model_name="tiny",reason="' in (await stack.get("/metrics")).body.decode()
    connection.close()
    await stack.idle()


async def test_whole_answers_that_are_never_read_hold_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(script(model=ENDLESS, capacity=ROOMY), stalled_client_s=0.5)
    body = {"model": "tiny", "prompt": [8], "max_tokens": 4000, "logprobs": 5}
    connection = await stack.open_raw(b"")
    stop_reading(connection)
    server = stack.gateway.server
    await eventually(lambda: server.connections, "a connection")
    # Each answer has some megabytes: after a few, the sockets are full and the next one cannot be sent.
    for _ in range(12):
        if not server.connections:
            break
        connection.writer.write(request_bytes("POST", COMPLETIONS, body))
        await eventually(lambda: engine_load(stack)[0] == 1 or not server.connections, "a running sequence")
        await stack.idle()
    await eventually(lambda: not server.connections, "a dropped connection", timeout_s=5)
    connection.close()
    await stack.idle()


async def test_a_reader_too_far_behind_is_dropped(start_stack: StartStack) -> None:
    stack = await start_stack(
        script(model=ENDLESS, capacity=ROOMY), stalled_client_s=60, stream_buffer_tokens=2000
    )
    fields = {"max_tokens": 90_000, "stream": True, "logprobs": 5, "prompt": [8]}
    connection = await stack.open_stream(COMPLETIONS, fields)
    stop_reading(connection)
    await eventually(lambda: engine_load(stack)[0] == 1, "a running sequence")
    await eventually(lambda: engine_load(stack) == (0, 0), "an idle engine", timeout_s=20)
    connection.close()
    await stack.idle()


async def test_a_deadline_ends_a_request(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=20), request_timeout_s=0.4)
    answer = await stack.complete(**LONG)
    assert (answer.status, answer.json()["error"]["code"]) == (504, "timeout")
    answer = await stack.complete(stream=True, **LONG)
    assert answer.status == 200
    assert answer.events[-1] == "[DONE]"
    assert answer.events[-2]["error"]["code"] == "timeout"
    assert "choices" not in answer.events[-2]
    await stack.idle()
