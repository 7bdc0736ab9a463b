"""Requests to one server over connections that are kept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from time import monotonic

from catenary_apps.load.answers import error_text
from catenary_apps.load.connection import Connection, Sink, StaleConnection
from catenary_apps.load.target import Endpoint, Target

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
        """A small answer as a whole, by a moment of time.monotonic; it says itself whether it failed."""
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
        """Raises OSError if none does."""
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
