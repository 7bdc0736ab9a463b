"""An HTTP/1.1 client with little work per chunk: requests to one server over connections that are kept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol, cast

import httptools

from catenary_apps.load.answers import error_text
from catenary_apps.load.target import Endpoint, Target

# How long a message may take to end after its answer did.
_REST_S = 5.0


class Sink(Protocol):
    """An answer as it comes; moments are of time.monotonic. Once `done` is set, no task waits for it."""

    started: bool
    done: bool
    failure: str | None

    def head(self, status: int, content_type: bytes) -> None:
        """Take the status line and the headers."""

    def body(self, data: bytes, now: float) -> None:
        """Take a part of the body."""

    def complete(self, now: float) -> None:
        """Note the end of the body."""

    def lost(self, now: float, detail: str) -> None:
        """Note that the connection is gone."""

    def fail(self, kind: str, detail: str, now: float) -> None:
        """End with a failure."""


class StaleConnection(Exception):
    """A kept connection was closed before anything of an answer came."""


class Connection(asyncio.Protocol):
    """Carries one request at a time.

    `on_free` is called when another may be sent, `on_lost` when none will be any more.
    """

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Sink | None = None
        self._used = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._content_type = b""
        self._now = 0.0
        self.open = False

    async def exchange(self, request: bytes, answer: Sink, deadline: float) -> None:
        """Send a request and wait until `answer` is done; at `deadline` (of time.monotonic) it fails.

        When this is left early, the connection is closed. Raises StaleConnection.
        """
        if self._transport is None:
            raise RuntimeError("it is not connected")
        self._parser, self._content_type = httptools.HttpResponseParser(self), b""
        self._answer, self._waiter = answer, self._loop.create_future()
        self._timer = self._loop.call_later(max(0.0, deadline - monotonic()), self._too_late)
        self._transport.write(request)
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise
        if self._answer is answer and self.open:
            # The answer is there, but the message has not ended. It would be one connection for each request.
            self._timer.cancel()
            self._timer = self._loop.call_later(_REST_S, self._too_late)

    def close(self) -> None:
        """Hang up at once. Idempotent."""
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if self._parser is None or answer is None:
            # Nobody asked for anything.
            self.close()
            return
        self._now = monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            answer.fail("bad_answer", "the answer is no HTTP", self._now)
            self._wake()
            self.close()
            return
        if answer.done:
            self._wake()
            # The rest of a message that is no use any more would have to be waited for.
            if answer.failure is not None and self._answer is answer:
                self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
        self._on_lost(self)
        if self._answer is None:
            return
        if self._used and not self._answer.started and not self._answer.done:
            self._wake(StaleConnection())
            return
        self._answer.lost(monotonic(), "the server closed the connection")
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.lower()

    def on_headers_complete(self) -> None:
        # 100 and its like announce the answer.
        if self._parser is not None and self._answer is not None and self._parser.get_status_code() >= 200:
            self._answer.head(self._parser.get_status_code(), self._content_type)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.body(data, self._now)

    def on_message_complete(self) -> None:
        parser, answer = self._parser, self._answer
        if parser is None or answer is None or not answer.started:
            return
        answer.complete(self._now)
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self._answer = self._parser = None
        self._used = True
        if parser.should_keep_alive() and self.open:
            self._on_free(self)
        else:
            self.close()

    def _too_late(self) -> None:
        """Fail: the answer did not come in time, or its message did not end when it did."""
        if self._answer is not None:
            self._answer.fail("timeout", "no answer in time", monotonic())
            self._wake()
        self.close()

    def _wake(self, error: StaleConnection | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)


_ROUTES = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}
_MAX_PAGE_BYTES = 1 << 20


class Client:
    """Sends as many requests at a time as it is asked to, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._context = target.context()
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._addresses: list[str] = []
        self.resent = 0
        """Requests that were sent again: a server may close a connection that waits, just as they come."""

    async def send(self, body: bytes, answer: Sink, request_id: str | None = None) -> None:
        """Send a request and wait until its answer is done; it says itself whether it failed."""
        head = self._target.head("POST", _ROUTES[self._target.endpoint], len(body), request_id)
        await self._send(head + body, answer, monotonic() + self._target.timeout_s)

    async def get(self, route: str, deadline: float) -> Page:
        """Return a small answer as a whole, by a moment of time.monotonic; it may have failed."""
        page = Page()
        await self._send(self._target.head("GET", route, None), page, deadline)
        return page

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for connection in list(self._all):
            connection.close()
        self._all.clear()
        self._free.clear()

    async def _send(self, request: bytes, answer: Sink, deadline: float) -> None:
        while True:
            connection = self._kept()
            try:
                if connection is None:
                    connection = await self._connect(deadline)
                await connection.exchange(request, answer, deadline)
            except StaleConnection:
                self.resent += 1
                continue
            except TimeoutError:
                answer.fail("timeout", "no connection in time", monotonic())
            except OSError as error:
                answer.fail("connect", error.strerror or type(error).__name__, monotonic())
            return

    def _kept(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self, deadline: float) -> Connection:
        async with asyncio.timeout(deadline - monotonic()):
            if not self._addresses:
                host, port = self._target.host, self._target.port
                found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._addresses = [str(info[4][0]) for info in found]
            connection = await self._first_that_answers(self._addresses)
        self._all.add(connection)
        return connection

    async def _first_that_answers(self, addresses: Sequence[str]) -> Connection:
        """Raise OSError if none does."""
        name = self._target.host if self._context is not None else None
        failed = OSError("no address")
        for address in addresses:
            try:
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._free.append, self._all.discard),
                    address,
                    self._target.port,
                    ssl=self._context,
                    server_hostname=name,
                )
            except OSError as error:
                failed = error
                continue
            # The name is looked up once, and what answers is kept: names cost more than connections.
            self._addresses = [address]
            return connection
        raise failed


class Page:
    """A small answer as a whole. `failure` is None, `status` (it is not 200), `connect`, `timeout`, `cut`,
    `bad_answer` or `size`."""

    def __init__(self) -> None:
        self.status = 0
        self.started = False
        self.done = False
        self.failure: str | None = None
        self.detail = ""
        self.content = b""

    def head(self, status: int, content_type: bytes) -> None:
        self.started, self.status = True, status

    def body(self, data: bytes, now: float) -> None:
        self.content += data
        if len(self.content) > _MAX_PAGE_BYTES:
            self.fail("size", f"a page has more than {_MAX_PAGE_BYTES} bytes", now)

    def complete(self, now: float) -> None:
        if self.status != 200:
            self.fail("status", error_text(self.content), now)
        self.done = True

    def lost(self, now: float, detail: str) -> None:
        if self.started:
            self.complete(now)
        else:
            self.fail("cut", detail, now)

    def fail(self, kind: str, detail: str, now: float) -> None:
        if not self.done:
            self.done, self.failure, self.detail = True, kind, detail
