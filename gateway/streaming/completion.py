"""Answers of `/v1/completions`: the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.logprobs import CompletionLogprobs, completion_logprobs
from gateway.streaming.sse import event
from gateway.streaming.usage import Usage
from gateway.text.vocabulary import Vocabulary


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionWriter:
    """Writes one completion request's answer, in pieces or whole."""

    def __init__(
        self, *, answer_id: str, created: int, model: str, vocabulary: Vocabulary, with_usage: bool
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._vocabulary = vocabulary
        self._absent_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, count: int, usage: Usage | None) -> bytes:
        """Completions have no chunk in front of their text."""
        return b""

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """The chunk for new text and the one for an end, as far as there is either."""
        chunks = b""
        if delta.text or delta.entries:
            logprobs = completion_logprobs(delta.entries, self._vocabulary) if delta.entries else None
            chunks += self._chunk([CompletionChoice(delta.index, delta.text, logprobs)], usage)
        if delta.finish_reason is not None:
            chunks += self._chunk([CompletionChoice(delta.index, "", None, delta.finish_reason)], usage)
        return chunks

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that closes a stream whose client asked for the usage."""
        return self._chunk([], usage)

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The answer that is not streamed."""
        choices = [
            CompletionChoice(
                result.index,
                result.text,
                None if result.entries is None else completion_logprobs(result.entries, self._vocabulary),
                result.finish_reason,
            )
            for result in results
        ]
        return msgspec.json.encode(self._object(choices, usage))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return event(self._object(choices, self._absent_usage if usage is None else usage))

    def _object(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage)
