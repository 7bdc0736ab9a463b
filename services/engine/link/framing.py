"""Frames on the link: a 4-byte big-endian length, then that many bytes of msgpack."""

from __future__ import annotations

from typing import Final

import msgspec

from services.engine.link.messages import Message

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
