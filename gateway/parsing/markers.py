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

        What is given ends with the last character that was read. `trim`: white space at the start is left out
        too. Returns None at the end of the text."""
        keep = MAX_SPACE if self._markers else 0
        space = 0  # so much white space comes next, unread
        while True:
            start = source.pos + space
            if start >= len(source.text):
                if source.ended:
                    last = source.take(space)
                    if last and not trim:
                        emit(last)
                    return None
                yield
                continue
            candidate = self._first.search(source.text, start) if self._first else None
            end = candidate.start() if candidate else len(source.text)
            if trim:
                plain = source.text[source.pos : end]
                source.take(len(plain) - len(plain.lstrip()))
                trim = source.pos == end
            plain = source.text[source.pos : end]
            shown = max(len(plain.rstrip()), len(plain) - keep)
            if shown:
                emit(source.take(shown))
            space = len(plain) - shown
            if candidate is None:
                continue
            marker = yield from self._match(source, space)
            if marker:
                return Found(marker, source.take(space))
            emit(source.take(space + 1))
            space, trim = 0, False

    def _match(self, source: Source, ahead: int) -> Scan[str]:
        """The marker that comes `ahead` characters further on, unread; empty if none does."""
        while True:
            start = source.pos + ahead
            here = source.text[start : start + self._length]
            for marker in self._markers:
                if here.startswith(marker):
                    return marker
            if source.ended or not any(marker.startswith(here) for marker in self._markers):
                return ""
            yield
