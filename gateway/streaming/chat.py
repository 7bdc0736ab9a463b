"""Chat answers: the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.logprobs import ChatLogprobs, chat_logprobs
from gateway.streaming.usage import Usage
from gateway.streaming.writer import Writer


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


class ChatWriter(Writer[ChunkChoice]):
    """Chats: the stream of each choice opens with the role."""

    def opening(self, count: int, usage: Usage | None) -> bytes:
        delta = Delta(role="assistant", content="")
        return b"".join(self._chunk([ChunkChoice(index, delta)], usage) for index in range(count))

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
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

    def _text(self, delta: ChoiceDelta) -> ChunkChoice:
        logprobs = chat_logprobs(delta.entries, self._vocabulary) if delta.entries else None
        return ChunkChoice(delta.index, Delta(content=delta.text), logprobs)

    def _end(self, index: int, finish_reason: str) -> ChunkChoice:
        return ChunkChoice(index, Delta(), None, finish_reason)

    def _object(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage)
