"""The events of a response's stream."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from gateway.responses.objects import OutputItem, OutputText, ReasoningText, Response
from gateway.streaming.answers import sse_event
from gateway.streaming.delta import ChatLogprob


class Event(msgspec.Struct, tag_field="type"):
    """`sequence_number` counts a stream's events from 0."""

    sequence_number: int


class OfResponse(Event):
    """An event of the response as a whole."""

    response: Response


class Created(OfResponse, tag="response.created"):
    pass


class Queued(OfResponse, tag="response.queued"):
    pass


class InProgress(OfResponse, tag="response.in_progress"):
    pass


class Completed(OfResponse, tag="response.completed"):
    pass


class Incomplete(OfResponse, tag="response.incomplete"):
    pass


class Failed(OfResponse, tag="response.failed"):
    pass


class Error(Event, tag="error"):
    """The stream ends without the response's end."""

    code: str | None
    message: str
    param: str | None


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class InItem(Event):
    """An event within the item `item_id`, the `output_index`th of the output."""

    item_id: str
    output_index: int


class InPart(InItem):
    """An event within a part of an item's content."""

    content_index: int


class PartAdded(InPart, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(InPart, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(InPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(InPart, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDelta(InPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | Error
)


def encode_event(value: Event) -> bytes:
    """Encode an event: its name, then its JSON on one line."""
    return b"event: " + str(value.__struct_config__.tag).encode() + b"\n" + sse_event(value)
