"""The two ends of the link: blocking for the core, asyncio for the servicer.

Neither end can make the other wait forever: the core's end keeps reading while its send is held up, and the
servicer's end reads in a task of its own.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from typing import Final

import msgspec

from catenary.frames import HEADER_BYTES, AsyncFrames, FrameBuffer, LinkClosed, MalformedFrame, seal
from services.engine.link.messages import FromCore, Message, ToCore

DEFAULT_MAX_FRAME_BYTES: Final = 64 * 1024 * 1024

_READ_BYTES: Final = 256 * 1024

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message, max_frame_bytes: int) -> bytearray:
    """Return header and body. Raises FrameTooLarge before anything is sent: the link stays usable."""
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    return seal(frame, max_frame_bytes)


def decode_body(body: bytes | bytearray | memoryview) -> Message:
    """Return the message of a frame. Raises MalformedFrame."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError) as exc:
        raise MalformedFrame("a link frame does not hold a message") from exc


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
        """End the `poll` that waits, or the next one that would. From any thread, at any time."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._alarm, 1)

    def send(self, message: FromCore) -> None:
        """Send one message, waiting for room. Raises LinkClosed, FrameTooLarge (nothing was sent)."""
        view = memoryview(encode_frame(message, self._max_frame_bytes))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._wait_for_room()
            except OSError as exc:
                raise LinkClosed("the servicer closed the link") from exc

    def poll(self, timeout: float | None = 0.0) -> list[ToCore]:
        """Return what has arrived; wait up to `timeout` seconds for the first message (None: for ever).

        Returns nothing after `wake`.
        Raises LinkClosed once the peer is gone and every message it sent was returned.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._read_available()
            messages = [_for_core(decode_body(body)) for body in self._inbound.take()]
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
        """Return the socket's descriptor, to wait for it together with others."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket. Idempotent."""
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

    def __init__(self, frames: AsyncFrames, max_frame_bytes: int) -> None:
        self._frames = frames
        self._max_frame_bytes = max_frame_bytes

    @classmethod
    async def open(cls, sock: socket.socket, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> AsyncLink:
        """Take over a connected stream socket."""
        return cls(await AsyncFrames.over(sock, max_frame_bytes), max_frame_bytes)

    async def send(self, message: ToCore) -> None:
        """Send one message, waiting for room. Raises LinkClosed, FrameTooLarge (nothing was sent)."""
        await self._frames.send(encode_frame(message, self._max_frame_bytes))

    async def receive(self) -> FromCore:
        """Return the next message. Raises LinkClosed at the end, FrameTooLarge, MalformedFrame."""
        return _from_core(decode_body(await self._frames.receive()))

    async def aclose(self) -> None:
        """Close the socket; what was sent is flushed if the core still reads."""
        await self._frames.aclose()


def _for_core(message: Message) -> ToCore:
    if isinstance(message, ToCore):
        return message
    raise MalformedFrame("a message for the servicer reached the core")


def _from_core(message: Message) -> FromCore:
    if isinstance(message, FromCore):
        return message
    raise MalformedFrame("a message for the core reached the servicer")
