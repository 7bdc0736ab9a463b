"""Length-framed bytes over a stream socket: 4 bytes big-endian, then the payload."""

from __future__ import annotations

import asyncio
import socket
import struct

_HEADER = struct.Struct(">I")


class LinkClosed(Exception):
    """The other side is gone."""


class BlockingFrames:
    """The worker's side."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def receive(self) -> bytearray:
        """The next frame. Raises LinkClosed at the end of the stream."""
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return self._exactly(length)

    def send(self, payload: bytes) -> None:
        """Send one frame. Raises LinkClosed if nobody listens."""
        try:
            # One write: the other side would wake for the header alone.
            self._link.sendall(_HEADER.pack(len(payload)) + payload)
        except OSError:
            raise LinkClosed from None

    def _exactly(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        filled = 0
        while filled < length:
            try:
                received = self._link.recv_into(view[filled:])
            except OSError:
                received = 0
            if received == 0:
                raise LinkClosed
            filled += received
        return buffer


class AsyncFrames:
    """The service's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, link: socket.socket) -> AsyncFrames:
        """Take over a connected socket."""
        return cls(*await asyncio.open_connection(sock=link))

    async def receive(self) -> bytes:
        """The next frame. Raises LinkClosed at the end of the stream."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            raise LinkClosed from None

    async def send(self, payload: bytes) -> None:
        """Send one frame. Raises LinkClosed if nobody listens."""
        try:
            self._writer.write(_HEADER.pack(len(payload)) + payload)
            await self._writer.drain()
        except OSError:
            raise LinkClosed from None

    def close(self) -> None:
        """Close the socket at once."""
        self._writer.transport.abort()
