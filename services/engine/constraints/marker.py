"""A text behind which a constraint begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from services.engine.constraints.matching import Bits, Grammar
from services.engine.constraints.vocabulary import Vocabulary, bits_of


class Marker:
    """Where a marker may end inside of a token. `text` is not empty.

    A token that completes the marker may go on behind it, and what it says there is the constrained text's
    beginning. So it is forbidden where the grammar does not begin that way.
    """

    def __init__(self, text: bytes, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.text = text
        self._vocabulary = vocabulary
        # By how much of the marker stands before the token; 0 for those that hold it whole.
        self._forbidden: list[Bits | None] = [None] * len(text)
        fits: dict[bytes, bool] = {}
        for held, found in self._completions():
            wrong = []
            for token_id, rest in found:
                if rest not in fits:
                    spelled = vocabulary.tokens(rest)
                    fits[rest] = spelled is not None and grammar.matcher().accept(spelled)
                if not fits[rest]:
                    wrong.append(token_id)
            if wrong:
                self._forbidden[held] = bits_of(wrong, vocabulary.words)

    def _completions(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """For each beginning of the marker, tokens that complete it and go on, with what comes behind it."""
        text, texts, order = self.text, self._vocabulary.texts, self._vocabulary.order
        whole = [(i, word.split(text, 1)[1]) for i, word in enumerate(texts) if text in word]
        yield 0, [(i, rest) for i, rest in whole if rest]
        for held in range(1, len(text)):
            missing = text[held:]
            first = bisect_left(order, missing, key=texts.__getitem__)
            found: list[tuple[int, bytes]] = []
            for token_id in order[first:]:
                word = texts[token_id]
                if not word.startswith(missing):
                    break
                if len(word) > len(missing):
                    found.append((token_id, word[len(missing) :]))
            yield held, found

    def forbidden(self, tail: bytes) -> Iterator[Bits]:
        """Sets of tokens that may not follow a text that ends with this."""
        for held, bits in enumerate(self._forbidden):
            if bits is not None and tail.endswith(self.text[:held]):
                yield bits


class MarkerSearch:
    """Looks for a marker in a growing text."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._tail = b""
        self.found = False

    def feed(self, text: bytes) -> bytes | None:
        """Takes the next part of the text. Returns what stands behind the marker, None before that."""
        wanted, seen = self._marker.text, self._tail + text
        before, found, rest = seen.partition(wanted)
        if found:
            self.found = True
            return rest
        self._tail = before[-(len(wanted) - 1) :] if len(wanted) > 1 else b""
        return None

    def forbidden(self) -> Iterator[Bits]:
        """Sets of tokens that may not follow."""
        return self._marker.forbidden(self._tail)
