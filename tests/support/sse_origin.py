"""A tiny server of the OpenAI API that streams what a test says, and misbehaves as told."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Exchange:
    """One request of a client, and the way to answer it."""

    number: int
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path.endswith("/chat/completions")

    async def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, value: Any) -> None:
        """Send an event in a chunk of its own."""
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def token(self, text: str = "x") -> None:
        """Send a chunk with a text."""
        choice = {"delta": {"content": text}} if self.chat else {"text": text}
        await self.event({"choices": [{"index": 0, "finish_reason": None, **choice}]})

    async def finish(self, *, usage: tuple[int, int] | None = None, done: bool = True) -> None:
        """Send the end of an answer; `usage` are the tokens of prompt and answer."""
        choice: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        await self.event({"choices": [{"index": 0, "finish_reason": "length", **choice}]})
        if usage is not None:
            counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
            await self.event({"choices": [], "usage": counts})
        if done:
            await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def refuse(self, status: int, message: str) -> None:
        """Answer with an error."""
        body = json.dumps({"error": {"message": message}}).encode()
        head = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await self.raw(head % (status, len(body)) + body)


Behaviour = Callable[[Exchange], Awaitable[None]]


async def polite(exchange: Exchange) -> None:
    """One token a chunk, as many as were asked for; a prompt has three tokens."""
    wanted = exchange.body.get("max_tokens") or 4
    await exchange.raw(HEAD)
    for _ in range(wanted):
        await exchange.token()
    await exchange.finish(usage=(3, wanted))


@dataclass
class Origin:
    """The running server."""

    behaviour: Behaviour
    address: str = ""
    # What GET /v1/models says each time, the last one for good; or the status that it refuses with.
    models: list[list[str]] | int = field(default_factory=lambda: [["m"]])
    exchanges: list[Exchange] = field(default_factory=list)
    connections: int = 0

    @property
    def bodies(self) -> list[Any]:
        """The bodies of all requests, in the order of their arrival."""
        return [exchange.body for exchange in self.exchanges]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                number = len(self.exchanges)
                exchange = Exchange(number, path, headers, json.loads(data) if data else None, writer)
                if method == "GET":
                    await self._list_models(exchange)
                    continue
                self.exchanges.append(exchange)
                await self.behaviour(exchange)
                if writer.is_closing():
                    return
        writer.close()

    async def _list_models(self, exchange: Exchange) -> None:
        if isinstance(self.models, int):
            await exchange.refuse(self.models, "no models")
            return
        names = self.models.pop(0) if len(self.models) > 1 else self.models[0]
        body = json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
        await exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@asynccontextmanager
async def running_origin(
    behaviour: Behaviour = polite, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Origin]:
    """Run a server in this loop."""
    origin = Origin(behaviour)
    server = await asyncio.start_server(origin.serve, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()[:2]
    origin.address = f"{'http' if tls is None else 'https'}://{host}:{port}"
    try:
        yield origin
    finally:
        server.close()
        for exchange in origin.exchanges:
            exchange.writer.close()
