"""Marks around the places where a caller's text spells a control token.

A mark is one private-use character, drawn per request among those that no text of the request contains. A
caller cannot forge it, and a template cannot cut it in two. The spelling stays readable between its marks, so
a template's own logic (`content.split('</think>')`) goes on working.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.tokenizer.rendering.errors import RenderRefused

_PRIVATE_USE = range(0xE000, 0xF900)
_DRAWS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the rendered prompt. `is_plain`: a caller's spelling, to be encoded without added tokens."""

    text: str
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Markers:
    """The two marks of one request."""

    start: str
    end: str

    @classmethod
    def draw(cls, texts: Sequence[str]) -> Markers:
        """Two marks that occur in none of `texts`. Raises RenderRefused if none are left."""
        used: set[str] = set().union(*map(set, texts))
        free = [mark for mark in map(chr, _PRIVATE_USE) if mark not in used]
        random.SystemRandom().shuffle(free)
        # A few tries: each looks through all texts, and only an attack makes one fail.
        unused = (mark for mark in free[:_DRAWS] if not any(_escaped(mark) in text for text in texts))
        start, end = next(unused, None), next(unused, None)
        if start is None or end is None:
            raise RenderRefused("The messages use too many private-use characters.", param="messages")
        return cls(start, end)

    def wrap(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        """`text` with marks around each span; the spans rise and do not overlap."""
        parts: list[str] = []
        position = 0
        for first, last in spans:
            parts += (text[position:first], self.start, text[first:last], self.end)
            position = last
        return "".join((*parts, text[position:]))

    def strip(self, text: str) -> str:
        """`text` without marks."""
        return self._pattern().sub("", text)

    def split(
        self, text: str, *, leading: Callable[[str], int], trailing: Callable[[str], int]
    ) -> Iterator[Piece]:
        """The pieces of a rendered prompt, in order, none of them empty.

        A template may have cut between two marks. What stands beside a mark that lost its partner is plain as
        far as it still spells a token: `leading` and `trailing` give the length of such a spelling at the
        start and at the end of a text.
        """
        parts = self._pattern().split(text)
        marks = [
            self.start if mark in (self.start, _escaped(self.start)) else self.end for mark in parts[1::2]
        ]
        before = ""
        for part, after in zip(parts[::2], (*marks, ""), strict=True):
            if before == self.start and after == self.end:
                cuts = (len(part), len(part))
            else:
                first = leading(part) if before == self.start else 0
                last = len(part) - (trailing(part) if after == self.end else 0)
                cuts = (first, max(first, last))
            first, last = cuts
            runs = (Piece(part[:first], True), Piece(part[first:last], False), Piece(part[last:], True))
            yield from (run for run in runs if run.text)
            before = after

    def _pattern(self) -> re.Pattern[str]:
        # A template that shows a dictionary, or JSON in ASCII, writes private-use characters as escapes.
        forms = (self.start, self.end, _escaped(self.start), _escaped(self.end))
        return re.compile("(" + "|".join(map(re.escape, forms)) + ")")


def _escaped(mark: str) -> str:
    """As Python's repr and JSON both write it."""
    return f"\\u{ord(mark):04x}"
