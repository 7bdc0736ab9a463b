"""Marks around the places where a caller's text spells a control token.

A mark is one private-use character, drawn per request among those that no text of the request contains. A
caller cannot forge it, and a template cannot cut it in two. The spelling stays readable between its marks, so
a template's own logic (`content.split('</think>')`) goes on working.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.tokenizer.rendering.errors import RenderRefused

_PRIVATE_USE = range(0x100000, 0x10FFFE)


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
    def draw(cls, texts: Iterable[str]) -> Markers:
        """Two marks that occur in none of `texts`. Raises RenderRefused if none are left."""
        used: set[str] = set().union(*map(set, texts))
        taken = {ord(character) for character in used if ord(character) in _PRIVATE_USE}
        if len(taken) + 2 > len(_PRIVATE_USE):
            raise RenderRefused("The messages use too many private-use characters.", param="messages")
        drawn = random.SystemRandom().sample(_PRIVATE_USE, len(taken) + 2)
        start, end = [mark for mark in drawn if mark not in taken][:2]
        return cls(chr(start), chr(end))

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
        return text.replace(self.start, "").replace(self.end, "")

    def split(
        self, text: str, *, leading: Callable[[str], int], trailing: Callable[[str], int]
    ) -> Iterator[Piece]:
        """The pieces of a rendered prompt, in order, none of them empty.

        A template may have cut between two marks. What stands beside a mark that lost its partner is plain as
        far as it still spells a token: `leading` and `trailing` give the length of such a spelling at the
        start and at the end of a text.
        """
        parts = re.split(f"([{self.start}{self.end}])", text)
        before = ""
        for part, after in zip(parts[::2], (*parts[1::2], ""), strict=True):
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
