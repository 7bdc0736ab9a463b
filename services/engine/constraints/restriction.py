"""Restriction of one sequence: its grammar, the marker before it, and its end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from services.engine.constraints.json_watch import JsonParts, JsonTokens, JsonWatch
from services.engine.constraints.vocabulary import Bits, Grammar, Matcher, Vocabulary, bits_of


class Marker:
    """Tokens inside of which a marker may end. `text` is not empty.

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
        """For each beginning of the marker, tokens that complete it, with their text behind it."""
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
        """Return the set of tokens that may not follow a text that ends with this."""
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
        """Take the next part of the text. Return the text behind the marker, None before that."""
        wanted, seen = self._marker.text, self._tail + text
        before, found, rest = seen.partition(wanted)
        if found:
            self.found = True
            return rest
        self._tail = before[-(len(wanted) - 1) :] if len(wanted) > 1 else b""
        return None

    def forbidden(self) -> Iterator[Bits]:
        """Return the set of tokens that may not follow."""
        return self._marker.forbidden(self._tail)


class Taken(Enum):
    """Effect of a token: it belongs to the text, ended it, or may not be there."""

    GOES_ON = "goes_on"
    ENDED = "ended"
    FAILED = "failed"


class CompiledConstraint:
    """Parts that all sequences with one constraint share. `json`: the parts of their texts that are JSON."""

    def __init__(
        self,
        grammar: Grammar,
        after: str | None,
        vocabulary: Vocabulary,
        json: tuple[JsonParts, JsonTokens] | None = None,
    ) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.marker = Marker(after.encode(), grammar, vocabulary) if after else None
        self._json = json

    def watch(self) -> JsonWatch | None:
        """Return a new watch of a text; None: no part of it is JSON."""
        return None if self._json is None else JsonWatch(*self._json)


class Restriction:
    """Follows a sequence from its first generated token on.

    `stop_ids` end the sequence: with those of the model, unless it ignores them. The text may end where the
    grammar says so; where nothing else may follow it does end, by an id of the model if need be. Elsewhere a
    stop id that spells text is text, and so it is before the marker.
    """

    def __init__(self, compiled: CompiledConstraint, stop_ids: frozenset[int]) -> None:
        self._vocabulary = compiled.vocabulary
        self._search = None if compiled.marker is None else MarkerSearch(compiled.marker)
        self._watch = compiled.watch()
        self.matcher: Matcher = compiled.grammar.matcher()
        self._stop_ids = stop_ids
        self._ends = stop_ids | self._vocabulary.eos_token_ids
        # Of the model's vocabulary, but no text.
        self._controls = self._vocabulary.control_ids & self._ends

    @property
    def active(self) -> bool:
        """False before the marker: anything may follow."""
        return self._search is None or self._search.found

    @property
    def complete(self) -> bool:
        """True if the text may end here."""
        return self.active and self.matcher.accepting

    def take(self, token_id: int) -> Taken:
        """Advance by a token."""
        if self._search is not None and not self._search.found:
            rest = self._search.feed(self._vocabulary.text(token_id))
            if not rest:
                return Taken.GOES_ON
            token_ids = self._vocabulary.tokens(rest)
            return Taken.FAILED if token_ids is None else self._accept(token_ids)
        if token_id in self._ends and self.matcher.accepting:
            # A stop id may be part of the text as well, among the first min_tokens.
            closes = token_id in self._vocabulary.closing or token_id in self._vocabulary.eos_token_ids
            if closes or not self.matcher.allows(token_id):
                return Taken.ENDED
        taken = self._accept([token_id])
        if taken is Taken.GOES_ON and token_id in self._stop_ids & self._controls and self.matcher.accepting:
            # The last of a tag.
            return Taken.ENDED
        return taken

    def narrow(self, row: Bits, *, mask_stops: bool) -> None:
        """Narrow the tokens that the matcher allows, int32 [W], to those that may be sampled.

        If not `active`, narrow all tokens.

        `mask_stops`: none of the stop ids, unless nothing else is left.
        """
        bits, logits = self._vocabulary.bits, self._vocabulary.logits
        if logits is not None:
            row &= logits
        if self._search is not None and not self._search.found:
            row[:] = -1 if logits is None else logits
            # The constrained part is still to come.
            row &= ~bits(self._vocabulary.closing | self._vocabulary.eos_token_ids | self._controls)
            for forbidden in self._search.forbidden():
                row &= ~forbidden
            return
        if self.matcher.accepting:
            row &= ~bits(self._vocabulary.closing)
            row |= bits(self._stop_ids if row.any() else self._ends)
        if self._watch is not None and (unwanted := self._watch.forbidden()) is not None:
            others = row & ~unwanted
            if others.any():
                np.copyto(row, others)
        if mask_stops:
            others = row & ~bits(self._stop_ids)
            if others.any():
                np.copyto(row, others)

    def _accept(self, token_ids: Sequence[int]) -> Taken:
        if not self.matcher.accept(token_ids):
            return Taken.FAILED
        if self._watch is not None:
            for token_id in token_ids:
                self._watch.feed(self._vocabulary.text(token_id))
        return Taken.GOES_ON
