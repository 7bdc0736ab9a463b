"""Chat answers: the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.logprobs import ChatLogprobs, chat_logprobs
from gateway.streaming.sse import event
from gateway.streaming.usage import Usage
from gateway.text.vocabulary import Vocabulary


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatWriter:
    """Writes one chat request's answer, in pieces or whole."""

    def __init__(
        self, *, answer_id: str, created: int, model: str, vocabulary: Vocabulary, with_usage: bool
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._vocabulary = vocabulary
        self._absent_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, count: int, usage: Usage | None) -> bytes:
        """The role chunk of each choice."""
        delta = Delta(role="assistant", content="")
        return b"".join(self._chunk([ChunkChoice(index, delta)], usage) for index in range(count))

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """The chunk for new text and the one for an end, as far as there is either. `usage`: the counts so
        far, for a client that wants them in every chunk.
        """
        chunks = b""
        if delta.text or delta.entries:
            logprobs = chat_logprobs(delta.entries, self._vocabulary) if delta.entries else None
            choice = ChunkChoice(delta.index, Delta(content=delta.text), logprobs)
            chunks += self._chunk([choice], usage)
        if delta.finish_reason is not None:
            choice = ChunkChoice(delta.index, Delta(), None, delta.finish_reason)
            chunks += self._chunk([choice], usage)
        return chunks

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that closes a stream whose client asked for the usage."""
        return self._chunk([], usage)

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The answer that is not streamed."""
        choices = [
            ChatChoice(
                result.index,
                Message("assistant", result.text),
                None if result.entries is None else chat_logprobs(result.entries, self._vocabulary),
                result.finish_reason,
            )
            for result in results
        ]
        answer = ChatCompletion(self._id, "chat.completion", self._created, self._model, choices, usage)
        return msgspec.json.encode(answer)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> bytes:
        reported = self._absent_usage if usage is None else usage
        return event(
            ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, reported)
        )
