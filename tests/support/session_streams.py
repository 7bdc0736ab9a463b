"""Streams of a gateway's session that no router serves: the test says what comes on them."""

from __future__ import annotations

import asyncio
from typing import Any

from catenary.schema import SCHEMA_REVISION
from catenary.v1 import router_pb2
from gateway.link.router_session import RouterSession


class GreetedStream:
    """A stream on which a router greets and then sends nothing; it takes and keeps everything."""

    def __init__(self, heartbeat_ms: int = 0) -> None:
        self.written: list[router_pb2.SessionRequest] = []
        self._welcome: router_pb2.SessionWelcome | None = router_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION, router_instance_id="router-1", heartbeat_ms=heartbeat_ms
        )

    async def write(self, message: router_pb2.SessionRequest) -> None:
        """Take a message."""
        self.written.append(message)

    async def read(self) -> router_pb2.SessionResponse:
        """Return the welcome at first; wait for ever then."""
        welcome, self._welcome = self._welcome, None
        if welcome is None:
            await asyncio.Event().wait()
        return router_pb2.SessionResponse(welcome=welcome)

    def cancel(self) -> None:
        """Take the end."""


class StreamChannel:
    """A channel on which each call of streams is this stream."""

    def __init__(self, stream: GreetedStream) -> None:
        self._stream = stream

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        """Return the method that opens the stream."""
        return lambda: self._stream

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        """Return a method that is not called."""

    unary_stream = unary_unary


class Listening:
    """Notes when a session is connected, and when it no longer is."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()

    def greeted(self, session: RouterSession, router: str) -> bool:
        """See Listener."""
        return True

    def changed(self, session: RouterSession) -> None:
        """See Listener."""
        (self.connected if session.connected else self.lost).set()


def session_on(stream: GreetedStream, listener: Listening, silence_s: float = 1) -> RouterSession:
    """Return a session on this stream."""
    channel: Any = StreamChannel(stream)
    return RouterSession(
        "unix:/nowhere",
        channel,
        instance_id="gateway-1",
        listener=listener,
        connect_timeout_s=1,
        silence_s=silence_s,
    )
