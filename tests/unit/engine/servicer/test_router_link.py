"""An engine's link to a router: what makes it dial again, and how soon."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc

from services.engine.servicer.attachment import KvPublishing
from services.engine.servicer.router_links import LinkTimes, RouterLink

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


def link(call: Ended) -> RouterLink:
    async def close() -> None:
        pass

    def method(*_args: Any, **_options: Any) -> Any:
        return lambda: call

    channel: Any = SimpleNamespace(
        stream_stream=method, unary_unary=method, unary_stream=method, stream_unary=method, close=close
    )
    facts = asyncio.Event()
    hub: Any = SimpleNamespace(facts=facts, ready=object(), state=0, draining=False, leave=lambda _box: None)
    identity: Any = SimpleNamespace(hello=lambda _ready, _state: None, instance_id="e")
    unused: Any = None
    publishing = KvPublishing(1, 1, 1, 1, 1, 1)
    return RouterLink("r", lambda _: channel, identity, hub, unused, TIMES, lambda _: False, publishing)


async def test_a_refusal_is_not_asked_for_again_soon() -> None:
    refused = Ended(grpc.StatusCode.UNAUTHENTICATED, "")
    assert await link(refused)._attach_once() == TIMES.refused_backoff_s


async def test_a_status_that_was_lost_is_heard_at_the_next_dial() -> None:
    """A write that fails because the call has just ended makes grpc.aio tell INTERNAL, whatever the router
    said: that is no refusal."""
    lost = Ended(grpc.StatusCode.INTERNAL, "Failed execute_batch")
    assert await link(lost)._attach_once() <= TIMES.backoff_max_s
