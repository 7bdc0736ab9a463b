"""Control tokens: which tokens steer a model, where a text spells one, and marks around such places.

The spellings are found by one regular expression for many literals, in time linear in the text however many
there are. A plain alternation tries every literal at every position: with the thousands of reserved tokens
that some tokenizers have, a megabyte of `<` would take minutes. A trie shares their prefixes.

A mark is one private-use character, drawn per request among those that no text of the request contains. A
caller cannot forge it, and a template cannot cut it in two. The spelling stays readable between its marks, so
a template's own logic (`content.split('</think>')`) keeps working.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.tokenizer.rendering.files import RenderRefused


class _Node:
    __slots__ = ("children", "is_end")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.is_end = False


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the leftmost literal, and of those the longest; without any, nothing."""
    root = _Node()
    for literal in literals:
        node = root
        for character in literal:
            node = node.children.setdefault(character, _Node())
        node.is_end = node is not root
    return re.compile(_branches(root) if root.children else "(?!)")


def _branches(node: _Node) -> str:
    expressions = [_expression(character, child) for character, child in sorted(node.children.items())]
    group = expressions[0] if len(expressions) == 1 else "(?:" + "|".join(expressions) + ")"
    return f"(?:{group})?" if node.is_end else group


def _expression(character: str, node: _Node) -> str:
    # Chains without a fork become one literal, so that depth grows with forks and not with length.
    chain = [character]
    while len(node.children) == 1 and not node.is_end:
        character, node = next(iter(node.children.items()))
        chain.append(character)
    literal = re.escape("".join(chain))
    return literal + _branches(node) if node.children else literal


class AddedToken(Protocol):
    """An added token as the tokenizers library describes it."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...

    @property
    def normalized(self) -> bool: ...


class Normalizer(Protocol):
    """A tokenizer's text normalizer."""

    def normalize_str(self, sequence: str) -> str: ...


class ControlTokens:
    """The control tokens of a tokenizer.

    These are its added tokens, special or not, but for those that only lengthen the vocabulary of ordinary
    text: not special and made of white space or of letters and digits alone (Gemma's runs of newlines, words
    of a trade). A caller's newline must stay the token that the model was trained on.
    """

    def __init__(self, added: Mapping[int, AddedToken], normalizer: Normalizer | None) -> None:
        control = {index: token for index, token in added.items() if _is_control(token)}
        self.ids = frozenset(control)
        self._spellings = frozenset(token.content for token in control.values())
        self._lengths = sorted({len(spelling) for spelling in self._spellings}, reverse=True)
        self._pattern = literal_pattern(self._spellings)
        # Some tokens are looked for in the normalized text: there, a look-alike may become the token.
        self._normalizer = normalizer
        normalized = {token.content for token in control.values() if token.normalized}
        self._normalized = (
            literal_pattern({normalizer.normalize_str(content) for content in normalized})
            if normalizer is not None and normalized
            else None
        )

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Return where `text` spells control tokens, leftmost and longest first; rising, without overlap.

        The whole text is one span if it spells one only after normalization, where positions are lost.
        """
        spans = [match.span() for match in self._pattern.finditer(text)]
        if self._normalized is not None and self._normalizer is not None:
            rest = self._without(text, spans)
            if self._normalized.search(self._normalizer.normalize_str(rest)):
                return [(0, len(text))]
        return spans

    def leading(self, text: str) -> int:
        """Return the length of the control token that `text` begins with, else 0."""
        match = self._pattern.match(text)
        return match.end() if match else 0

    def trailing(self, text: str) -> int:
        """Return the length of the longest control token that `text` ends with, else 0."""
        return next((length for length in self._lengths if text[-length:] in self._spellings), 0)

    @staticmethod
    def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
        position = 0
        rest: list[str] = []
        for first, last in spans:
            rest.append(text[position:first])
            position = last
        return "\n".join((*rest, text[position:]))


def _is_control(token: AddedToken) -> bool:
    return token.special or not (token.content.isspace() or token.content.isalnum())


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
        """Return two marks that occur in none of `texts`. Raises RenderRefused if none are left."""
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
        """Return `text` with marks around each span; the spans rise and do not overlap."""
        parts: list[str] = []
        position = 0
        for first, last in spans:
            parts += (text[position:first], self.start, text[first:last], self.end)
            position = last
        return "".join((*parts, text[position:]))

    def strip(self, text: str) -> str:
        """Return `text` without marks."""
        return self._pattern().sub("", text)

    def split(
        self, text: str, *, leading: Callable[[str], int], trailing: Callable[[str], int]
    ) -> Iterator[Piece]:
        """Yield the pieces of a rendered prompt, in order, none of them empty.

        A template may have cut between two marks. Text next to a mark that lost its partner is plain as far
        as it still spells a token: `leading` and `trailing` give the length of such a spelling at the start
        and at the end of a text.
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
    """Return `text` as Python's repr and JSON both write it."""
    return f"\\u{ord(mark):04x}"
