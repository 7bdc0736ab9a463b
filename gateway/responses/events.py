"""The events of a response's stream."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from gateway.responses.items import OutputItem, OutputText, ReasoningText
from gateway.responses.objects import Response
from gateway.streaming.logprobs import ChatLogprob
from gateway.streaming.sse import event


class Event(msgspec.Struct, tag_field="type"):
    """`sequence_number` counts a stream's events from 0."""

    sequence_number: int


class Created(Event, tag="response.created"):
    response: Response


class InProgress(Event, tag="response.in_progress"):
    response: Response


class Completed(Event, tag="response.completed"):
    response: Response


class Incomplete(Event, tag="response.incomplete"):
    response: Response


class Failed(Event, tag="response.failed"):
    response: Response


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
)


def encode_event(value: Event) -> bytes:
    """The event as it is sent: its name, then its JSON on one line."""
    return b"event: " + str(value.__struct_config__.tag).encode() + b"\n" + event(value)
