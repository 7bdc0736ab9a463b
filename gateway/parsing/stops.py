"""Stop strings in what is for the reader: neither in reasoning nor in calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary.text import StopScanner


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string that ended an answer. Places count the characters of the whole text, as it was parsed.

    text: the string; shown: where the text that is shown ends; end: the place behind the string."""

    text: str
    shown: int
    end: int


class ContentStops:
    """Looks for stop strings in content as a parser finds it.

    Content that reasoning, a call or a marker parts is two texts: no stop string begins in one and ends in
    the other."""

    __slots__ = ("_end", "_include", "_scanner", "begin", "found")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`stops`: none is empty; `include`: the stop string is content too."""
        self._scanner = StopScanner(stops)
        self._include = include
        self._end = 0
        self.begin = 0
        """Nothing is looked for in front of this place."""
        self.found: Stop | None = None

    def read(self, text: str, end: int) -> str:
        """Take content that ends at the place `end`; returns what of it, and of what was held, is shown."""
        if self.found is not None:
            return ""
        start = end - len(text)
        before = self.flush() if start != self._end else ""
        self._end = end
        if start < self.begin:
            free = text[: self.begin - start]
            before += self.flush() + free
            text = text[len(free) :]
        held = self._scanner.held
        scan = self._scanner.feed(text)
        if (matched := scan.matched) is None:
            return before + scan.text
        shown = end - len(text) - held + len(scan.text)
        behind = shown + len(matched)
        self.found = Stop(matched, behind if self._include else shown, behind)
        return before + scan.text + (matched if self._include else "")

    def flush(self) -> str:
        """The content held back, where it ends."""
        return self._scanner.flush()

    def settled(self, place: int) -> int:
        """How much of the text in front of `place` no stop string can cut away any more."""
        return min(place, self._end - self._scanner.held) if self._scanner.held else place
