"""The gateway's HTTP protocol on a connection in memory, before an application that tells of what it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.errors import ApiError
from gateway.http.context import RequestContext
from gateway.http.protocol import HttpLimits, LimitedHttpProtocol


class MemoryTransport(asyncio.Transport):
    """A connection whose client reads all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.state = "open"
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        """Keep it."""
        assert self.state == "open", "written after the end"
        self.sent += data

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def write_eof(self) -> None:
        """SplitPart-close."""
        self.state = "lingering"

    def close(self) -> None:
        """Close."""
        self.state = "closed"

    def abort(self) -> None:
        """Close."""
        self.state = "closed"

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self.state == "closed"

    def get_write_buffer_size(self) -> int:
        """All was sent."""
        return 0

    def pause_reading(self) -> None:
        """Nothing to pause."""

    def resume_reading(self) -> None:
        """Nothing to resume."""


class _Watched(LimitedHttpProtocol):
    client_side: MemoryConnection

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self._in_message:
            self.client_side.request_ended()

    def _refuse(self, error: ApiError) -> None:
        super()._refuse(error)
        self.client_side.request_ended()


class MemoryConnection:
    """A client's side of it."""

    def __init__(self, **limits: Any) -> None:
        self.requests: list[tuple[str, int]] = []
        """Path and bytes of the body of each request that the application has read whole."""
        self.fed = 0
        self.ended_at: int | None = None
        """Bytes that had been sent when the first request was whole, or was refused."""
        self.transport = MemoryTransport()
        context = RequestContext(
            self._application, allowed_hosts=["*"], observe=lambda *_: None, stall_s=30.0
        )
        config = uvicorn.Config(
            context, loop="none", ws="none", lifespan="off", log_config=None, access_log=False
        )
        config.load()
        self.protocol = _Watched(config, ServerState(), {})
        self.protocol.client_side = self
        self.protocol.limits = HttpLimits(**limits)
        self.protocol.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        """Send bytes, and let the server do what it can."""
        self.fed += len(data)
        if self.transport.state != "closed":
            self.protocol.data_received(data)
        for _ in range(12):
            await asyncio.sleep(0)

    def request_ended(self) -> None:
        """The server has read a request, or has refused it."""
        if self.ended_at is None:
            self.ended_at = self.fed

    def close(self) -> None:
        """Hang up."""
        self.protocol.connection_lost(None)

    @property
    def statuses(self) -> list[int]:
        """Of the answers, interim ones left out."""
        heads = [part for part in self.transport.sent.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100")]
        return [int(head[:3]) for head in heads]

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        self.requests.append((scope["path"], size))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
