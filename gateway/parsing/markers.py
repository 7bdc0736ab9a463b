"""Finding markers in running text, which is held back only while it may begin one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.parsing.source import Emit, Scan, Source

MAX_SPACE = 256
"""White space in front of a marker that is left out with it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A marker that comes next, unread, and the white space before it, which was read and not shown."""

    marker: str
    space: str


class MarkerSet:
    """Markers to look for together. None is the beginning of another."""

    __slots__ = ("_first", "_length", "_markers")

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(dict.fromkeys(markers))
        self._length = max(map(len, self._markers), default=0)
        # One character class: the search is a plain loop over the text.
        first = "".join(sorted({re.escape(marker[0]) for marker in self._markers}))
        self._first = re.compile(f"[{first}]") if first else None

    def seek(self, source: Source, emit: Emit, *, trim: bool = False) -> Scan[Found | None]:
        """Give text to `emit` up to the next marker, without the white space in front of it.

        `trim`: white space at the start is left out too. Returns None at the end of the text."""
        space = ""
        while True:
            if source.pos >= len(source.text):
                if source.ended:
                    if space and not trim:
                        emit(space)
                    return None
                yield
                continue
            candidate = self._first.search(source.text, source.pos) if self._first else None
            end = candidate.start() if candidate else len(source.text)
            if end > source.pos:
                plain = source.take(end - source.pos)
                if trim:
                    plain = plain.lstrip()
                    trim = not plain
                space = _show(space + plain, emit, MAX_SPACE if self._markers else 0)
            if candidate is None:
                continue
            marker = yield from self._match(source)
            if marker:
                return Found(marker, space)
            emit(space + source.take(1))
            space, trim = "", False

    def _match(self, source: Source) -> Scan[str]:
        """The marker that comes next, unread; empty if none does."""
        while True:
            here = source.text[source.pos : source.pos + self._length]
            for marker in self._markers:
                if here.startswith(marker):
                    return marker
            if source.ended or not any(marker.startswith(here) for marker in self._markers):
                return ""
            yield


def _show(text: str, emit: Emit, keep: int) -> str:
    """Emit all but the white space at the end, of which the last `keep` characters are returned."""
    shown = max(len(text.rstrip()), len(text) - keep)
    if shown:
        emit(text[:shown])
    return text[shown:]
