"""Stop strings in a stream of text.

The scanner reads character by character, so its result does not depend on how tokens or steps cut the text:
the match that is complete first wins, and of those that complete together the longest. Text is held back
only while it is the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """Text that may be shown now, and the stop string that was found right behind it."""

    text: str
    matched: str | None = None


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: `state` is how much of it the text ends with."""

    __slots__ = ("_fallback", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fallback = _fallbacks(text)

    def advance(self, char: str) -> bool:
        """Take one character; true when the whole string was read."""
        state = self.state
        while state and self.text[state] != char:
            state = self._fallback[state - 1]
        if self.text[state] == char:
            state += 1
        if state == len(self.text):
            return True
        self.state = state
        return False


def _fallbacks(text: str) -> list[int]:
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class StopScanner:
    """Scans one sequence's text for its stop strings (each non-empty)."""

    __slots__ = ("_first_chars", "_held", "_patterns")

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._first_chars = {stop[0] for stop in stops}
        self._held = ""

    @property
    def held(self) -> int:
        """Characters that were read and not shown yet."""
        return len(self._held)

    def feed(self, text: str) -> Scan:
        """Read `text`. After a match the scanner must not be used again."""
        if not self._held and self._first_chars.isdisjoint(text):
            return Scan(text)
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            longest = ""
            for pattern in self._patterns:
                if pattern.advance(pending[position]) and len(pattern.text) > len(longest):
                    longest = pattern.text
            if longest:
                self._held = ""
                return Scan(pending[: position + 1 - len(longest)], longest)
        keep = max((pattern.state for pattern in self._patterns), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return Scan(pending[:cut])

    def flush(self) -> str:
        """Return the text held back, once nothing more can complete a match. Text that is read afterwards is
        another one."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.state = 0
        return held
