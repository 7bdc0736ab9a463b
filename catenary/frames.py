"""Messages over a stream socket: 4 bytes of length, big-endian, then so many bytes.

The one frame of our own links between processes of a host, with a blocking and an asyncio end. What the bytes
mean is up to the link. Standard library only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

HEADER_BYTES: Final = 4
LONGEST_FRAME: Final = (1 << 8 * HEADER_BYTES) - 1

_READ_BYTES: Final = 256 * 1024


class LinkError(Exception):
    """The link cannot be used any more."""


class LinkClosed(LinkError):
    """The peer closed its end, or died."""

    def __init__(self, text: str = "the peer closed the link") -> None:
        super().__init__(text)


class FrameTooLarge(LinkError):
    """A frame is longer than the link's limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a link frame of {size} bytes is over the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class MalformedFrame(LinkError):
    """A frame does not hold a message of the link."""


def seal(frame: bytearray, limit: int = LONGEST_FRAME) -> bytearray:
    """Write the length into the first HEADER_BYTES, left free, of a frame; return the frame.

    Raises FrameTooLarge before anything is sent: the link stays usable.
    """
    size = len(frame) - HEADER_BYTES
    if size > limit:
        raise FrameTooLarge(size, limit)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


def body_size(header: bytes | bytearray | memoryview, limit: int = LONGEST_FRAME) -> int:
    """Return the length of the body that follows this header. Raises FrameTooLarge."""
    size = int.from_bytes(header, "big")
    if size > limit:
        raise FrameTooLarge(size, limit)
    return size


def fill(view: memoryview, receive_into: Callable[[memoryview], int]) -> None:
    """Receive until the view is full. Raises LinkClosed at the end of the stream, and the socket's errors."""
    while view:
        received = receive_into(view)
        if not received:
            raise LinkClosed
        view = view[received:]


class FrameBuffer:
    """Collects received bytes and cuts them into the bodies of frames."""

    def __init__(self, limit: int = LONGEST_FRAME) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._pending += data

    def take(self) -> list[bytes]:
        """Remove and return the complete bodies. Raises FrameTooLarge."""
        bodies: list[bytes] = []
        start = 0
        with memoryview(self._pending) as view:
            while len(view) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + body_size(view[start:body], self._limit)
                if end > len(view):
                    break
                bodies.append(bytes(view[body:end]))
                start = end
        del self._pending[:start]
        return bodies


class BlockingFrames:
    """One end of a link, for a thread that has nothing else to wait for."""

    def __init__(self, sock: socket.socket, limit: int = LONGEST_FRAME) -> None:
        self._sock = sock
        self._limit = limit

    def receive(self) -> bytearray:
        """Wait for a frame and return its body. Raises LinkClosed at the end of the stream, FrameTooLarge."""
        return self._exactly(body_size(self._exactly(HEADER_BYTES), self._limit))

    def send(self, frame: bytearray) -> None:
        """Send a sealed frame. Raises LinkClosed."""
        try:
            self._sock.sendall(frame)
        except OSError as exc:
            raise LinkClosed from exc

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        try:
            fill(memoryview(data), self._sock.recv_into)
        except OSError as exc:
            raise LinkClosed from exc
        return data


class AsyncFrames:
    """One end of a link, for an event loop. One task receives; any task may send."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int = LONGEST_FRAME
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit

    @classmethod
    async def over(cls, sock: socket.socket, limit: int = LONGEST_FRAME) -> AsyncFrames:
        """Take over a connected stream socket."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=_READ_BYTES), limit)

    async def receive(self) -> bytes:
        """Wait for a frame and return its body. Raises LinkClosed at the end of the stream, FrameTooLarge."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return await self._reader.readexactly(body_size(header, self._limit))
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise LinkClosed from exc

    async def send(self, frame: bytearray) -> None:
        """Send a sealed frame, waiting for room. Raises LinkClosed."""
        if self._writer.is_closing():
            raise LinkClosed("the link is closed")
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as exc:
            raise LinkClosed from exc

    def abort(self) -> None:
        """Close the socket at once."""
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Close the socket; what was sent is flushed if the peer still reads."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
