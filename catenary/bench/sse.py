"""Server-sent events out of bytes, however these are cut."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20


class EventTooLarge(ValueError):
    """An event is larger than MAX_EVENT_BYTES."""


class EventReader:
    """Collects the data of events; their names, ids and comments are left out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now, in order. Raises EventTooLarge."""
        if self._rest:
            data = self._rest + data
        # JSON has no raw carriage return, so lines end with them or with none. One at the end may be half of
        # a line's end.
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES} bytes")
        # An event without data is none.
        return [found for block in blocks if (found := _data(block))]


def _data(block: bytes) -> bytes:
    """The data of an event."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
