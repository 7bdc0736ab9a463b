"""Answers of `/v1/completions`: the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.logprobs import CompletionLogprobs, completion_logprobs
from gateway.streaming.usage import Usage
from gateway.streaming.writer import Writer


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


class CompletionWriter(Writer[CompletionChoice]):
    """Completions: a chunk is an object like the whole answer."""

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
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

    def _text(self, delta: ChoiceDelta) -> CompletionChoice:
        logprobs = completion_logprobs(delta.entries, self._vocabulary) if delta.entries else None
        return CompletionChoice(delta.index, delta.text, logprobs)

    def _end(self, index: int, finish_reason: str) -> CompletionChoice:
        return CompletionChoice(index, "", None, finish_reason)

    def _object(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage)
