"""Opening and closing of connections: room for one more, and ends that cost no client its answer."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from catenary.telemetry import get_logger
from gateway.errors import ApiError, unavailable

_log = get_logger(__name__)


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LOOK_S = 0.05
_LOOK_LATER_S = 0.5
_PROBE_AGAIN_S = 1.0
_PROBE_LATER_S = 10.0
_OLD_CLIENT_S = 1.0


class LingeringTransport(asyncio.Transport):
    """Connection that is closed in two steps while its client still sends.

    Closing a socket with unread bytes resets the connection, and the client loses the answer that it was
    about to read. So the sending side is shut first, and further input goes to the protocol, which is to drop
    it, until the client closes too or `linger_s` have passed."""

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool], linger_s: float) -> None:
        """Wrap `transport`.

        Args:
            transport: the connection.
            unread: whether the client may be sending more than was read of it.
            linger_s: longest time between the two steps; 0 closes at once.
        """
        super().__init__()
        self._transport = transport
        self._unread = unread
        self.linger_s = linger_s
        self._timer: asyncio.TimerHandle | None = None
        # Called for each part of a stream.
        self.write = transport.write  # type: ignore[method-assign]

    @property
    def lingering(self) -> bool:
        """Whether only the second step is left."""
        return self._timer is not None

    def close(self) -> None:
        """Close once all written data is sent."""
        if self.is_closing():
            return
        if self.linger_s <= 0 or not self._unread():
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(self.linger_s, self._transport.close)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Close at once, and drop unsent data."""
        self._transport.abort()

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        """Return whether `close` was called: no more is to be written or parsed."""
        return self._timer is not None or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self._transport.writelines(list_of_data)

    def pause_reading(self) -> None:
        """Leave further input to the kernel. A lingering connection goes on reading."""
        if not self.lingering:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


def closed_unless_asked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap `app` so that its answer ends the connection if the client was not told to send its body.

    A client with `Expect: 100-continue` that gets a final answer at once may send the body or leave it out:
    its next bytes could be either that body or another request."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and cycle.waiting_for_100_continue
                and cycle.more_body
            ):
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, send_closing)

    return answer


class HalfClosedClients:
    """Probes of the clients that stopped sending: which of them still wait for their answers.

    To the server a client that is gone looks like one that closed only its sending side. If it is gone, its
    kernel resets the connection when data arrives: so an interim answer (100 Continue, which every HTTP/1.1
    client must skip) is sent now and then until the answer itself begins. HTTP/1.0 knows no interim answers:
    such a client counts as gone after a second.

    asyncio does not watch a socket whose other side has sent all, so a reset shows only on a look: one timer
    serves all of a server's connections, while there are any."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        """Add a connection whose client has sent the whole request of `cycle`."""
        now = asyncio.get_running_loop().time()
        one = _Waiting(transport, cycle, began=now, next_probe=now, due=now)
        if one.look(now):
            self._waiting[transport] = one
            self._arm(one.due)

    def discard(self, transport: asyncio.Transport) -> None:
        self._waiting.pop(transport, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            if self._next <= due:
                return
            self._timer.cancel()
        self._next = due
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for transport, one in list(self._waiting.items()):
            if one.due <= now and not one.look(now):
                self._waiting.pop(transport, None)
        if self._waiting:
            self._arm(min(one.due for one in self._waiting.values()))


@dataclass(slots=True)
class _Waiting:
    """Client that stopped sending. Times are the loop's, in seconds; `due`: time of the next probe."""

    transport: asyncio.Transport
    cycle: RequestResponseCycle
    began: float
    next_probe: float
    due: float

    def look(self, now: float) -> bool:
        """Probe the client, or end its connection if it is gone. Return whether to probe it again."""
        if self.cycle.response_started or self.transport.is_closing():
            # Writes find out by themselves.
            return False
        old, waited = self.cycle.scope["http_version"] == "1.0", now - self.began
        if self._failed() or (old and waited >= _OLD_CLIENT_S):
            self.transport.abort()
            return False
        if not old and now >= self.next_probe:
            self.transport.write(_CONTINUE)
            self.next_probe += _PROBE_AGAIN_S if waited < _PROBE_AGAIN_S else _PROBE_LATER_S
        self.due = now + (_LOOK_S if waited < _PROBE_AGAIN_S else _LOOK_LATER_S)
        return True

    def _failed(self) -> bool:
        kept: socket.socket | None = self.transport.get_extra_info("socket")
        return kept is None or kept.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


_TELL_AGAIN_S = 60.0
# Connections beyond --max-connections that are told so at a time, each for a second; more are cut off. No
# option: their descriptors come out of the reserve below, which has room for these.
MAX_TURNED_AWAY = 64


def _descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Room:
    """Limit of connections, which keeps some descriptors free for files and for other services."""

    def __init__(self, max_connections: int, descriptor_limit: Callable[[], int] = _descriptor_limit) -> None:
        """Make the limit of a server.

        Args:
            max_connections: most connections at a time.
            descriptor_limit: the process's limit of open file descriptors; negative: there is none.
        """
        self._max_connections = max_connections
        limit = descriptor_limit()
        self._descriptors = limit if limit >= 0 else 1 << 62
        # The kernel gives the lowest free number: that of a new connection tells how many are open.
        self._reserve = max(8, min(64, limit // 8))
        self._told: float | None = None
        self.turned_away = 0
        """Connections that are open only to be told that they are refused."""

    def refusal(self, connections: int, descriptor: int) -> ApiError | None:
        """Return the error that refuses a new connection, by the number of connections with it and its
        descriptor; None if it is accepted."""
        if descriptor >= self._descriptors - self._reserve:
            self._tell("descriptors", self._descriptors)
            return unavailable(
                f"The server is at its limit of {self._descriptors} open file descriptors.",
                code="too_many_connections",
            )
        if connections - self.turned_away > self._max_connections:
            self._tell("connections", self._max_connections)
            return unavailable(
                f"The server is at its limit of {self._max_connections} connections.",
                code="too_many_connections",
            )
        return None

    def can_tell(self, descriptor: int) -> bool:
        """Return whether one more connection may stay open for a moment to be told that it is refused."""
        near = descriptor >= self._descriptors - self._reserve // 2
        return self.turned_away < MAX_TURNED_AWAY and not near

    def _tell(self, of: str, limit: int) -> None:
        now = time.monotonic()
        if self._told is None or now - self._told >= _TELL_AGAIN_S:
            self._told = now
            _log.warning("new connections are refused at the limit", of=of, limit=limit)
