"""Server-sent events out of bytes, however these are cut."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20

Event = tuple[bytes, bytes]
"""The name of an event (mostly none) and its data."""


class EventTooLarge(ValueError):
    """An event is larger than MAX_EVENT_BYTES."""


class EventReader:
    """Collects events; their ids and comments are left out, and so are those without name and data."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now, in order. Raises EventTooLarge."""
        rest = self._rest
        if rest:
            seam = bytes(rest[-3:]) + data
            rest += data
            # What came before is not looked at again: an event of megabytes comes in thousands of parts.
            if b"\n\n" not in seam and b"\n\r\n" not in seam:
                _check(rest)
                return []
            data = bytes(rest)
        # JSON has no raw carriage return, so lines end with them or with none. One at the end may be half of
        # a line's end.
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, left = data.split(b"\n\n")
        if rest or left:
            self._rest = bytearray(left)
            _check(self._rest)
        return [event for block in blocks if any(event := _event(block))]


def _check(rest: bytearray) -> None:
    if len(rest) > MAX_EVENT_BYTES:
        raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES} bytes")


def _event(block: bytes) -> Event:
    if block.startswith(b"data: ") and b"\n" not in block:
        return b"", block[6:]
    name, lines = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(lines)
