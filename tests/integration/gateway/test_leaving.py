"""A gateway that leaves: its clients are told, served meanwhile, and lose no request."""

from __future__ import annotations

import asyncio

import pytest

from gateway.app import GatewayApp
from tests.support.gateway import COMPLETIONS, MODEL, Stack, script
from tests.support.http import Answer, Connection, call, request_bytes
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

SHORT = {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 1}


class KeptClient:
    """Keeps its connection as long as the server does, and then goes to the next gateway."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._connection: Connection | None = None
        self.statuses: list[int] = []
        self.served_by: list[str] = []

    async def ask(self) -> Answer:
        if self._connection is None or self._connection.reader.at_eof():
            self._connection = await Connection.to(self._addresses[0])
        self.served_by.append(self._addresses[0])
        await self._connection.send(request_bytes("POST", COMPLETIONS, SHORT))
        answer = await asyncio.wait_for(self._connection.answer(), 20)
        self.statuses.append(answer.status)
        if answer.headers.get("connection") == "close":
            self._connection.close()
            self._connection = None
            self._addresses = [*self._addresses[1:], self._addresses[0]]
        return answer

    async def ask_until(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self.ask()
        for _ in range(3):
            await self.ask()
        if self._connection is not None:
            self._connection.close()


async def test_a_rolling_restart_of_two_gateways_fails_no_request(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=2), drain_notice_s=0.5, drain_s=20.0)
    second = GatewayApp(stack.gateway.config)
    await second.start()
    try:
        await eventually(lambda: second.ready, "a second gateway", timeout_s=30)
        both = [stack.address, second.address]
        long = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}
        stream = await stack.open_stream(COMPLETIONS, long)
        assert (await stream.head())[0] == 200
        clients = [KeptClient(both if number % 2 else both[::-1]) for number in range(4)]
        over = asyncio.Event()
        asking = [asyncio.create_task(client.ask_until(over)) for client in clients]
        await eventually(lambda: all(len(client.statuses) > 2 for client in clients), "clients at work")
        await stack.gateway.stop()
        over.set()
        await asyncio.gather(*asking)
        body = b""
        while chunk := await stream.chunk():
            body += chunk
        assert body.endswith(b"data: [DONE]\n\n")
        assert await stream.reader.read() == b"", "the stream's connection ends with it"
        stream.close()
        for client in clients:
            assert set(client.statuses) == {200}
            assert client.served_by[-1] == second.address
    finally:
        await second.stop(0)


async def test_a_gateway_that_leaves_says_so_and_serves_meanwhile(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5), drain_notice_s=1.0)
    kept = await stack.open_raw(request_bytes("POST", COMPLETIONS, SHORT))
    assert "connection" not in (await kept.answer()).headers
    silent = await stack.open_raw(request_bytes("GET", "/live"))
    await silent.answer()
    stopping = asyncio.create_task(stack.gateway.stop())
    await eventually(lambda: not stack.gateway.ready, "a gateway that leaves")
    ready = await stack.get("/ready")
    assert (ready.status, ready.json(), ready.headers["connection"]) == (503, {"status": "draining"}, "close")
    assert (await stack.get("/health")).status == 200
    await kept.send(request_bytes("POST", COMPLETIONS, SHORT))
    answer = await kept.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await kept.reader.read() == b""
    await eventually(lambda: stack.gateway.requests.draining, "a gateway that drains", timeout_s=10)
    assert await asyncio.wait_for(silent.reader.read(), 5) == b""
    await asyncio.wait_for(stopping, 10)
    for connection in (kept, silent):
        connection.close()


async def test_a_client_that_was_not_told_in_time_is_told_next_time(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5), drain_notice_s=600.0)
    kept = await stack.open_stream(COMPLETIONS, {**SHORT, "max_tokens": 60, "stream": True})
    status, headers = await kept.head()
    assert (status, "connection" in headers) == (200, False)
    stopping = asyncio.create_task(stack.gateway.stop())
    await eventually(lambda: not stack.gateway.ready, "a gateway that leaves")
    while await kept.chunk():
        pass
    await kept.send(request_bytes("POST", COMPLETIONS, SHORT))
    answer = await kept.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await kept.reader.read() == b""
    kept.close()
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)


async def test_a_gateway_that_can_serve_nothing_leaves_at_once(start_stack: StartStack) -> None:
    stack = await start_stack(drain_notice_s=600.0)
    await stack.engine.stop()
    await eventually(lambda: not stack.gateway.ready, "a gateway without an engine")
    await asyncio.wait_for(stack.gateway.stop(), 20)
    with pytest.raises(OSError):
        await call(stack.address, "GET", "/live")


async def test_refusals_while_draining_end_their_connections(start_stack: StartStack) -> None:
    stack: Stack = await start_stack(script(step_delay_ms=5))
    job = asyncio.create_task(stack.complete(max_tokens=100, stream=True))
    await eventually(lambda: stack.engine.app.frontend.load().running == 1, "a running sequence")
    stopping = asyncio.create_task(stack.gateway.stop(10))
    await eventually(lambda: stack.gateway.requests.draining, "a draining gateway")
    refused = await stack.complete()
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    assert refused.headers["retry-after"] == "1"
    assert (await job).events[-1] == "[DONE]"
    await asyncio.wait_for(stopping, 10)
