"""Which tokens steer a model, and where a text spells one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.tokenizer.rendering.literals import literal_pattern


class AddedToken(Protocol):
    """What the tokenizers library tells about an added token."""

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
        """Where `text` spells control tokens, leftmost and longest first; rising, without overlap.

        The whole text is one span if it spells one only after normalization, where positions are lost.
        """
        spans = [match.span() for match in self._pattern.finditer(text)]
        if self._normalized is not None and self._normalizer is not None:
            rest = self._without(text, spans)
            if self._normalized.search(self._normalizer.normalize_str(rest)):
                return [(0, len(text))]
        return spans

    def leading(self, text: str) -> int:
        """Length of the control token that `text` begins with, else 0."""
        match = self._pattern.match(text)
        return match.end() if match else 0

    def trailing(self, text: str) -> int:
        """Length of the longest control token that `text` ends with, else 0."""
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
