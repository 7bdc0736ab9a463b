"""An engine's link to a router: what makes it dial again, and how soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.engine.servicer.attachment import KvPublishing
from services.engine.servicer.router_links import LinkTimes, RouterLink
from tests.support.virtual_time import virtual_time

TIMES = LinkTimes(
    attach_timeout_s=5, orphan_timeout_s=5, backoff_s=0.01, backoff_max_s=0.05, refused_backoff_s=60
)


class Ended:
    """A call that ends with `code` before its first write is through."""

    def __init__(self, code: grpc.StatusCode, debug: str) -> None:
        none = grpc.aio.Metadata()
        self._error = grpc.aio.AioRpcError(code, none, none, "Internal error from Core", debug)

    async def write(self, _message: Any) -> None:
        raise self._error

    async def code(self) -> grpc.StatusCode:
        return self._error.code()

    async def details(self) -> str:
        return self._error.details() or ""

    def cancel(self) -> None:
        pass


async def wait_s(call: Ended) -> float:
    """Return the time between the first two attempts to attach."""
    loop = asyncio.get_running_loop()
    dialled: list[float] = []
    running = asyncio.create_task(link(call, lambda: dialled.append(loop.time())).run())
    async with asyncio.timeout(1000):
        while len(dialled) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    return dialled[1] - dialled[0]


def link(call: Ended, on_dial: Callable[[], None]) -> RouterLink:
    async def close() -> None:
        pass

    def method(*_args: Any, **_options: Any) -> Any:
        return lambda: call

    channel: Any = SimpleNamespace(
        stream_stream=method, unary_unary=method, unary_stream=method, stream_unary=method, close=close
    )
    facts = asyncio.Event()
    facts.set()
    hub: Any = SimpleNamespace(facts=facts, ready=object(), state=0, draining=False, leave=lambda _box: None)
    identity: Any = SimpleNamespace(hello=lambda _ready, _state: None, instance_id="e")
    unused: Any = None
    publishing = KvPublishing(1, 1, 1, 1, 1, 1)

    def dial(_: str) -> Any:
        on_dial()
        return channel

    return RouterLink("r", dial, identity, hub, unused, TIMES, lambda _: False, publishing)


@virtual_time
async def test_a_refusal_is_not_asked_for_again_soon() -> None:
    refused = Ended(grpc.StatusCode.UNAUTHENTICATED, "")
    assert await wait_s(refused) == pytest.approx(TIMES.refused_backoff_s)


@virtual_time
async def test_a_status_that_was_lost_is_heard_at_the_next_dial() -> None:
    """A write that fails because the call has just ended makes grpc.aio tell INTERNAL, whatever the router
    said: that is no refusal."""
    lost = Ended(grpc.StatusCode.INTERNAL, "Failed execute_batch")
    assert await wait_s(lost) <= TIMES.backoff_max_s + 0.001
