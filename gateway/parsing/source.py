"""Text that arrives in pieces, and the search for markers in it.

A scanner is a generator: it yields whenever it needs more text and goes on when there is some. Its output
depends on the characters alone, never on where the pieces ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


Scan: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s+")
MAX_HELD = 1 << 16
"""Characters that may wait for the name of a call, or for the end of a value whose type shows only there. Not
an option: it bounds the memory of one choice (streamed arguments do not count), and no known model writes a
longer one."""
MAX_DRAFT = 1 << 18
"""Characters of a call in the reasoning, which waits for its end. No option, as above."""


class Malformed(Exception):
    """The text is not the call that it began as; the part that was read is content."""


class CutShort(Exception):
    """The text ended inside of a call."""


class Source:
    """Text that has arrived and is unread: `text[pos:]`."""

    __slots__ = ("_held", "_most", "_record", "_since", "ended", "pos", "taken", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        """Whether no text follows."""
        self.taken = 0
        """Characters read."""
        self._record: list[str] | None = None
        self._held = 0
        self._most = MAX_HELD
        self._since = 0

    @property
    def settled(self) -> int:
        """Characters whose kind is known: those that were read and are not held."""
        return self.taken if self._record is None else self._since

    def feed(self, text: str) -> None:
        """Append a piece. Scanners leave little unread, so that copying it costs little."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def ahead(self, count: int) -> Scan[str]:
        """Return the next `count` characters, unread. Raises CutShort if the text ends before."""
        while len(self.text) - self.pos < count:
            if self.ended:
                raise CutShort
            yield
        return self.text[self.pos : self.pos + count]

    def peek(self) -> Scan[str]:
        """Return the next character, unread; empty at the end."""
        while self.pos >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def next(self) -> Scan[str]:
        """Return the next character, unread. Raises CutShort at the end."""
        while self.pos >= len(self.text):
            if self.ended:
                raise CutShort
            yield
        return self.text[self.pos]

    def take(self, count: int) -> str:
        """Read `count` characters that are there. Raises Malformed if too much is held, by one character more
        than the limit, however many were asked for."""
        if self._record is not None:
            count = min(count, self._most + 1 - self._held)
        end = self.pos + count
        text = self.text[self.pos : end]
        self.pos = end
        self.taken += count
        if self._record is not None:
            self._record.append(text)
            self._held += count
            if self._held > self._most:
                raise Malformed
        return text

    def skip_space(self) -> Scan[str]:
        """Read white space; return the next character, unread. Raises CutShort at the end."""
        while True:
            char = yield from self.next()
            if not char.isspace():
                return char
            space = _SPACE.match(self.text, self.pos)
            self.take(space.end() - self.pos if space else 1)

    def accept(self, literal: str) -> Scan[bool]:
        """Read `literal` if it comes next, and return whether it did."""
        count = yield from self.matching(literal)
        if not count:
            return False
        self.take(count)
        return True

    def matching(self, literal: str, at: int = 0) -> Scan[int]:
        """Return the length of `literal` if it comes `at` characters ahead, else 0. Wait only while it
        may."""
        while True:
            start = self.pos + at
            here = self.text[start : start + len(literal)]
            if len(here) == len(literal):
                return len(here) if here == literal else 0
            if self.ended or not literal.startswith(here):
                return 0
            yield

    def blank(self, at: int, most: int) -> Scan[str]:
        """Return the white space `at` characters further on, up to `most` of it, unread."""
        while True:
            ahead = self.text[self.pos + at : self.pos + at + most]
            space = ahead[: len(ahead) - len(ahead.lstrip())]
            if len(space) < len(ahead) or len(space) == most or self.ended:
                return space
            yield

    def hold(self, before: str, most: int = MAX_HELD) -> None:
        """Record the text that is read from now on, up to `most` characters; `before`: text read already that
        belongs to it."""
        self._record = [before]
        self._since = self.taken - len(before)
        self._held = 0
        self._most = most

    def hold_on(self, most: int = MAX_HELD) -> None:
        """Raise the limit of held text to `most`."""
        self._most = most

    def unread(self, text: str) -> None:
        self.text = text + self.text[self.pos :]
        self.pos = 0
        self.taken -= len(text)

    def release(self) -> str:
        """Forget the held text, and return it; empty if there was none."""
        held = "".join(self._record or ())
        self._record = None
        return held


MAX_SPACE = 256
"""Most white space in front of a marker that is dropped with it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Marker that comes next, unread, and the white space before it, which was read and not emitted."""

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
        """Emit text up to the next marker, without the white space in front of it.

        Emitted text ends with the last character that was read. `trim`: white space at the start is dropped
        too. Return None at the end of the text."""
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
        """Return the marker that comes `ahead` characters further on, unread; empty if none does."""
        while True:
            start = source.pos + ahead
            here = source.text[start : start + self._length]
            for marker in self._markers:
                if here.startswith(marker):
                    return marker
            if source.ended or not any(marker.startswith(here) for marker in self._markers):
                return ""
            yield
