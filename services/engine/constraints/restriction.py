"""What may follow in one sequence: its grammar, the marker before it, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from services.engine.constraints.json_watch import JsonParts, JsonTokens, JsonWatch
from services.engine.constraints.marker import Marker, MarkerSearch
from services.engine.constraints.matching import Bits, Grammar, Matcher
from services.engine.constraints.vocabulary import Vocabulary


class Taken(Enum):
    """What a token of the sequence did: it belongs to the text, ended it, or may not be there."""

    GOES_ON = "goes_on"
    ENDED = "ended"
    FAILED = "failed"


class CompiledConstraint:
    """What all sequences with one constraint share. `json`: where their texts are JSON."""

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
        """A new one for a text; None: no part of it is JSON."""
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
        """False as long as anything may follow, for the marker was not seen."""
        return self._search is None or self._search.found

    @property
    def complete(self) -> bool:
        """True if the text may end here."""
        return self.active and self.matcher.accepting

    def take(self, token_id: int) -> Taken:
        """Goes on by a token."""
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
        """Makes of what the matcher allows, int32 [W], what may be sampled; of anything if not `active`.

        `mask_stops`: none of the stop ids, unless nothing else is left.
        """
        bits, logits = self._vocabulary.bits, self._vocabulary.logits
        if logits is not None:
            row &= logits
        if self._search is not None and not self._search.found:
            row[:] = -1 if logits is None else logits
            # What is constrained is still to come.
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
