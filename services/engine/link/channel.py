"""The two ends of the link: blocking for the core, asyncio for the servicer.

Neither end can make the other wait forever: the core's end goes on reading while its send is held up, and the
servicer's end reads in a task of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import threading
import time
from typing import Final

import msgspec

from services.engine.link.messages import FromCore, Message, ToCore

HEADER_BYTES: Final = 4
DEFAULT_MAX_FRAME_BYTES: Final = 64 * 1024 * 1024

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkError(Exception):
    """The link cannot be used any more."""


class LinkClosed(LinkError):
    """The peer closed its end, or died."""


class FrameTooLarge(LinkError):
    """A frame is longer than the link's limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a link frame of {size} bytes is over the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class MalformedFrame(LinkError):
    """A frame does not hold a message of the link."""


def encode_frame(message: Message, max_frame_bytes: int) -> bytearray:
    """Returns header and body. Raises FrameTooLarge before anything is sent: the link stays usable."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > max_frame_bytes:
        raise FrameTooLarge(size, max_frame_bytes)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


def body_size(header: bytes | bytearray | memoryview, max_frame_bytes: int) -> int:
    """Length of the body that follows this header. Raises FrameTooLarge."""
    size = int.from_bytes(header, "big")
    if size > max_frame_bytes:
        raise FrameTooLarge(size, max_frame_bytes)
    return size


def decode_body(body: bytes | bytearray | memoryview) -> Message:
    """Raises MalformedFrame if the body is not one message."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError) as exc:
        raise MalformedFrame("a link frame does not hold a message") from exc


class FrameBuffer:
    """Collects received bytes and cuts them into messages."""

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds received bytes."""
        self._pending += data

    def take(self) -> list[Message]:
        """Removes and returns the complete messages. Raises FrameTooLarge, MalformedFrame."""
        messages: list[Message] = []
        start = 0
        with memoryview(self._pending) as view:
            while len(view) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + body_size(view[start:body], self._max_frame_bytes)
                if end > len(view):
                    break
                messages.append(decode_body(bytes(view[body:end])))
                start = end
        del self._pending[:start]
        return messages


_READ_BYTES: Final = 256 * 1024


class BlockingLink:
    """The core's end, used by one thread but for `wake`. It owns the socket."""

    def __init__(self, sock: socket.socket, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_frame_bytes = max_frame_bytes
        self._inbound = FrameBuffer(max_frame_bytes)
        self._eof = False
        # Written to from other threads, one of which may do so while the link is closed.
        self._lock = threading.Lock()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def wake(self) -> None:
        """Ends the `poll` that waits, or the next one that would. From any thread, at any time."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._alarm, 1)

    def send(self, message: FromCore) -> None:
        """Sends one message, waiting for room. Raises LinkClosed, FrameTooLarge (nothing was sent)."""
        view = memoryview(encode_frame(message, self._max_frame_bytes))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._wait_for_room()
            except OSError as exc:
                raise LinkClosed("the servicer closed the link") from exc

    def poll(self, timeout: float | None = 0.0) -> list[ToCore]:
        """Returns what has arrived; waits up to `timeout` seconds for the first message (None: for ever).

        Returns nothing after `wake`.
        Raises LinkClosed once the peer is gone and every message it sent was returned.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._read_available()
            messages = [_for_core(message) for message in self._inbound.take()]
            if messages:
                return messages
            if self._eof:
                raise LinkClosed("the servicer closed the link")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            self._wait(select.POLLIN, left, self._alarm)
            if self._awoken():
                return []

    def fileno(self) -> int:
        """The socket's descriptor, to wait for it beside others."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._alarm)

    def _awoken(self) -> bool:
        try:
            return os.eventfd_read(self._alarm) > 0
        except BlockingIOError:
            return False

    def _wait_for_room(self) -> None:
        if self._wait(select.POLLOUT if self._eof else select.POLLIN | select.POLLOUT, None) & select.POLLIN:
            self._read_available()

    def _wait(self, events: int, timeout: float | None, alarm: int | None = None) -> int:
        # poll, not select: the descriptor is inherited and may be above select's limit.
        poller = select.poll()
        poller.register(self._sock, events)
        if alarm is not None:
            poller.register(alarm, select.POLLIN)
        ready = dict(poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        return ready.get(self._sock.fileno(), 0)

    def _read_available(self) -> None:
        while not self._eof:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._eof = True
            self._inbound.feed(data)


class AsyncLink:
    """The servicer's end. One task receives; any task may send."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_frame_bytes = max_frame_bytes

    @classmethod
    async def open(cls, sock: socket.socket, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> AsyncLink:
        """Takes over a connected stream socket."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=_READ_BYTES)
        return cls(reader, writer, max_frame_bytes=max_frame_bytes)

    async def send(self, message: ToCore) -> None:
        """Sends one message, waiting for room. Raises LinkClosed, FrameTooLarge (nothing was sent)."""
        frame = encode_frame(message, self._max_frame_bytes)
        if self._writer.is_closing():
            raise LinkClosed("the link to the core is closed")
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as exc:
            raise LinkClosed("the core closed the link") from exc

    async def receive(self) -> FromCore:
        """Returns the next message. Raises LinkClosed at the end, FrameTooLarge, MalformedFrame."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            body = await self._reader.readexactly(body_size(header, self._max_frame_bytes))
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise LinkClosed("the core closed the link") from exc
        return _from_core(decode_body(body))

    async def aclose(self) -> None:
        """Closes the socket; what was sent is flushed if the core still reads."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return


def _for_core(message: Message) -> ToCore:
    if isinstance(message, ToCore):
        return message
    raise MalformedFrame("a message for the servicer reached the core")


def _from_core(message: Message) -> FromCore:
    if isinstance(message, FromCore):
        return message
    raise MalformedFrame("a message for the core reached the servicer")
