"""Chat answers: the assistant's message, the chunks of a stream and the whole object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.streaming.delta import (
    ChatLogprobs,
    ChoiceDelta,
    ChoiceResult,
    PromptLogprob,
    PromptReport,
    chat_logprobs,
    prompt_logprobs,
)
from gateway.streaming.writer import Usage, Writer, listed


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """Reasoning has two names: clients know one or the other."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


def delta_of(part: Part, *, legacy: bool = False) -> Delta:
    """A part as a chunk has it; `legacy`: the one call is told as `function_call`."""
    match part:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text, reasoning=text)
        case ToolCallStart(index, call_id, name):
            function = FunctionDelta(name, "")
            call = ToolCallDelta(index, call_id, "function", function)
        case ToolCallArguments(index, text):
            function = FunctionDelta(arguments=text)
            call = ToolCallDelta(index, function=function)
    return Delta(function_call=function) if legacy else Delta(tool_calls=[call])


def message_of(parts: Iterable[Part], *, legacy: bool = False) -> Message:
    """All parts of a choice; `legacy` as in `delta_of`. The content is null where there is none but something
    else."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append((part, []))
            case ToolCallArguments(_, text):
                calls[-1][1].append(text)
    message = Message("assistant", "".join(content))
    if reasoning:
        message.reasoning_content = message.reasoning = "".join(reasoning)
    if calls and legacy:
        ((start, arguments),) = calls
        message.function_call = Function(start.name, "".join(arguments))
    elif calls:
        message.tool_calls = [
            ToolCall(start.id, "function", Function(start.name, "".join(arguments)))
            for start, arguments in calls
        ]
    if not content and (reasoning or calls):
        message.content = None
    return message


_PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET


class ChatWriter(Writer[ChunkChoice]):
    """Chats: the stream of each choice opens with the role; the answer tells of its one prompt."""

    def opening(self, count: int, usage: Usage | None) -> bytes:
        delta = Delta(role="assistant", content="")
        return b"".join(self._chunk([ChunkChoice(index, delta)], usage) for index in range(count))

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                result.index,
                message_of(
                    [Content(result.text)] if result.parts is None else result.parts, legacy=self._legacy
                ),
                None if result.entries is None else chat_logprobs(result.entries, self._names),
                result.finish_reason,
                result.stop_reason,
                listed(result.token_ids),
            )
            for result in results
        ]
        answer = ChatCompletion(
            self._id, "chat.completion", self._created, self._model, choices, usage, self._service_tier
        )
        if (prompt := results[0].prompt) is not None:
            answer.prompt_token_ids = listed(prompt.token_ids)
            logprobs = prompt_logprobs(prompt, self._names)
            answer.prompt_logprobs = UNSET if logprobs is None else logprobs
        return msgspec.json.encode(answer)

    def _choices(self, delta: ChoiceDelta) -> Iterable[ChunkChoice]:
        if delta.parts is None:
            yield from super()._choices(delta)
            return
        parts = [delta_of(part, legacy=self._legacy) for part in delta.parts]
        if parts or delta.entries or delta.token_ids or delta.prompt is not None:
            yield self._told(delta, parts[0] if parts else Delta())
        for part in parts[1:]:
            yield ChunkChoice(delta.index, part)

    def _text(self, delta: ChoiceDelta) -> ChunkChoice:
        return self._told(delta, Delta(content=delta.text))

    def _told(self, delta: ChoiceDelta, part: Delta) -> ChunkChoice:
        choice = ChunkChoice(delta.index, part)
        if delta.entries:
            choice.logprobs = chat_logprobs(delta.entries, self._names)
        if delta.token_ids:
            choice.token_ids = list(delta.token_ids)
        return choice

    def _end(self, delta: ChoiceDelta) -> ChunkChoice:
        return ChunkChoice(delta.index, Delta(), None, delta.finish_reason, delta.stop_reason)

    def _object(
        self, choices: list[ChunkChoice], usage: Usage | UnsetType | None, prompt: PromptReport | None
    ) -> ChatChunk:
        chunk = ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._model,
            choices,
            usage,
            self._service_tier,
        )
        if prompt is not None:
            chunk.prompt_token_ids = listed(prompt.token_ids)
        return chunk
