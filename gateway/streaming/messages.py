"""The assistant's message of a chat answer: as deltas of a stream, and whole."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from gateway.parsing.events import Content, Part, Reasoning, ToolCallArguments, ToolCallStart


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
