"""Answers of chats and completions: the chunks of a stream, and the whole object."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from catenary.text import Vocabulary
from gateway.errors import ApiError
from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.streaming.delta import (
    ChatLogprobs,
    ChoiceDelta,
    ChoiceResult,
    CompletionLogprobs,
    PromptLogprob,
    PromptReport,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

C = TypeVar("C")


SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family hold events back unless told not to.
    (b"x-accel-buffering", b"no"),
)

_encoder = msgspec.json.Encoder()
# Older clients cut lines at these characters too.
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_line(payload: Any) -> bytes:
    """Encode JSON on one line, by every reader's definition of a line."""
    data = _encoder.encode(payload)
    if not data.isascii():
        for character, escape in _LINE_BREAKS:
            data = data.replace(character, escape)
    return data


def sse_event(payload: Any) -> bytes:
    """Return `data: {json}` and a blank line."""
    return b"data: " + json_line(payload) + b"\n\n"


def sse_error_event(error: ApiError) -> bytes:
    """Return the event of an error inside a stream: `error` and no `choices`."""
    return sse_event(error.envelope())


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Prompts are counted once however many choices they have; completions are summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Usage:
    """Return usage with its sum. None: not known, and left out."""
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        None if cached_tokens is None else PromptTokensDetails(cached_tokens),
        None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


# Stands for the text of a chunk whose rest is encoded once. It cannot occur in a model's name.
_HOLE = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Fields that all chunks of an answer share.

    answer_id: its id; created: Unix time in seconds; model: the served name; vocabulary: names of tokens in
    log probabilities; tokens_as_ids: name them by their ids; with_usage: a stream ends with the usage, and
    all its other chunks have `usage: null`; service_tier: the requested one; legacy_calls: a call is written
    as `function_call`."""

    answer_id: str
    created: int
    model: str
    vocabulary: Vocabulary
    tokens_as_ids: bool = False
    with_usage: bool = False
    service_tier: str | None = None
    legacy_calls: bool = False


class Writer(ABC, Generic[C]):
    """Encoder of one request's answer, in pieces or whole. `C` is a choice of one of its chunks."""

    odd_prefix: ClassVar[str] = ""

    def __init__(self, head: AnswerHead) -> None:
        self._id = head.answer_id
        self._created = head.created
        self._model = head.model
        self._names = TokenNames(head.vocabulary, as_ids=head.tokens_as_ids, odd_prefix=self.odd_prefix)
        self._absent_usage: UnsetType | None = None if head.with_usage else UNSET
        self._legacy = head.legacy_calls
        self._service_tier = UNSET if head.service_tier is None else head.service_tier
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def ready(self) -> None:
        """Encode the parts that chunks of text share, while the engine still works on the first one."""
        self._framed(0, "")

    def opening(self, count: int, usage: Usage | None) -> bytes:
        """Return the events in front of the text of `count` choices; none by default."""
        return b""

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """Return the event for new output and the one for the end, as far as there is either.

        `usage`: the counts so far, for a client that wants them in every chunk."""
        if usage is None and (text := _alone(delta)) is not None:
            return self._framed(delta.index, text) if text or delta.parts else b""
        data, prompt = b"", delta.prompt
        for choice in self._choices(delta):
            data += self._chunk([choice], usage, prompt)
            prompt = None
        if delta.finish_reason is not None:
            data += self._chunk([self._end(delta)], usage)
        return data

    def usage(self, usage: Usage) -> bytes:
        """Return the event without choices that closes a stream whose client asked for the usage."""
        return self._chunk([], usage)

    @abstractmethod
    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """Return the answer in one JSON object."""

    def _choices(self, delta: ChoiceDelta) -> Iterable[C]:
        """Yield the choice of each chunk that a delta makes."""
        if delta.text or delta.entries or delta.token_ids or delta.prompt is not None:
            yield self._text(delta)

    @abstractmethod
    def _text(self, delta: ChoiceDelta) -> C:
        """Return a chunk's choice with new text."""

    @abstractmethod
    def _end(self, delta: ChoiceDelta) -> C:
        """Return a chunk's choice with its finish reason."""

    @abstractmethod
    def _object(
        self, choices: list[C], usage: Usage | UnsetType | None, prompt: PromptReport | None
    ) -> msgspec.Struct:
        """Return a chunk."""

    def _framed(self, index: int, text: str) -> bytes:
        if (frame := self._frames.get(index)) is None:
            before, _, after = self._chunk([self._text(ChoiceDelta(index, _HOLE))], None).partition(
                json_line(_HOLE)
            )
            frame = self._frames[index] = before, after
        return frame[0] + json_line(text) + frame[1]

    def _chunk(self, choices: list[C], usage: Usage | None, prompt: PromptReport | None = None) -> bytes:
        return sse_event(self._object(choices, self._absent_usage if usage is None else usage, prompt))


AnyWriter = Writer[Any]


def _alone(delta: ChoiceDelta) -> str | None:
    """Return the text of a delta that is nothing but text, as most are; None for others."""
    if delta.entries or delta.token_ids or delta.prompt is not None or delta.finish_reason is not None:
        return None
    parts = delta.parts
    if parts is None:
        return delta.text
    if not parts:
        return ""
    part = parts[0]
    return part.text if len(parts) == 1 and isinstance(part, Content) else None


def listed(ids: Sequence[int] | None) -> list[int] | UnsetType:
    """Return ids as a field of an answer, which is absent where the request did not ask for them."""
    return UNSET if ids is None else list(ids)


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
    """Return a part as a chunk has it; `legacy`: the one call is written as `function_call`."""
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
    """Return all parts of a choice; `legacy` as in `delta_of`. Content is null if it has only others."""
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
    """Encoder of chats: each choice's stream opens with the role; the answer reports on its prompt."""

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


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


class CompletionWriter(Writer[CompletionChoice]):
    """Encoder of completions: a chunk is like the whole answer; each choice reports on its prompt."""

    odd_prefix = "bytes:"

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        choices = [
            self._with_prompt(
                CompletionChoice(
                    result.index,
                    result.text,
                    None if result.entries is None else completion_logprobs(result.entries, self._names),
                    result.finish_reason,
                    result.stop_reason,
                    listed(result.token_ids),
                ),
                result.prompt,
            )
            for result in results
        ]
        return msgspec.json.encode(self._object(choices, usage, None))

    def _text(self, delta: ChoiceDelta) -> CompletionChoice:
        choice = CompletionChoice(delta.index, delta.text)
        if delta.entries:
            choice.logprobs = completion_logprobs(delta.entries, self._names)
        if delta.token_ids:
            choice.token_ids = list(delta.token_ids)
        return self._with_prompt(choice, delta.prompt)

    def _end(self, delta: ChoiceDelta) -> CompletionChoice:
        return CompletionChoice(delta.index, "", None, delta.finish_reason, delta.stop_reason)

    def _with_prompt(self, choice: CompletionChoice, prompt: PromptReport | None) -> CompletionChoice:
        if prompt is not None:
            choice.prompt_token_ids = listed(prompt.token_ids)
            logprobs = prompt_logprobs(prompt, self._names)
            choice.prompt_logprobs = UNSET if logprobs is None else logprobs
        return choice

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, prompt: PromptReport | None
    ) -> Completion:
        return Completion(
            self._id, "text_completion", self._created, self._model, choices, usage, self._service_tier
        )
