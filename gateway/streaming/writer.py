"""What the answers of all generating routes have in common: an id, a clock, and when there is a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.sse import event
from gateway.streaming.usage import Usage
from gateway.text.vocabulary import Vocabulary

C = TypeVar("C")


class Writer(ABC, Generic[C]):
    """Writes one request's answer, in pieces or whole. `C` is a choice of one of its chunks."""

    def __init__(
        self, *, answer_id: str, created: int, model: str, vocabulary: Vocabulary, with_usage: bool
    ) -> None:
        """Set what is the same in all chunks.

        Args:
            answer_id: the answer's id.
            created: Unix time in seconds.
            model: the served name.
            vocabulary: what log probabilities name tokens with.
            with_usage: whether a stream ends with the usage; all its other chunks then have `usage: null`.
        """
        self._id = answer_id
        self._created = created
        self._model = model
        self._vocabulary = vocabulary
        self._absent_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, count: int, usage: Usage | None) -> bytes:
        """Events in front of the text of `count` choices: none."""
        return b""

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """The event for new text and the one for an end, as far as there is either.

        `usage`: the counts so far, for a client that wants them in every chunk."""
        data = b""
        if delta.text or delta.entries:
            data += self._chunk([self._text(delta)], usage)
        if delta.finish_reason is not None:
            data += self._chunk([self._end(delta.index, delta.finish_reason)], usage)
        return data

    def usage(self, usage: Usage) -> bytes:
        """The event without choices that closes a stream whose client asked for the usage."""
        return self._chunk([], usage)

    @abstractmethod
    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The answer in one JSON object."""

    @abstractmethod
    def _text(self, delta: ChoiceDelta) -> C:
        """A chunk's choice with new text."""

    @abstractmethod
    def _end(self, index: int, finish_reason: str) -> C:
        """A chunk's choice that says why it ended."""

    @abstractmethod
    def _object(self, choices: list[C], usage: Usage | UnsetType | None) -> msgspec.Struct:
        """A chunk."""

    def _chunk(self, choices: list[C], usage: Usage | None) -> bytes:
        return event(self._object(choices, self._absent_usage if usage is None else usage))


AnyWriter = Writer[Any]
