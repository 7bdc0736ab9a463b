"""Items of a conversation: what a response is asked about, and what it puts out."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from gateway.http.answers import Page
from gateway.streaming.logprobs import ChatLogprob

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text that came from outside."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text that a model wrote. There is nothing here that makes annotations."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text that a model wrote for itself."""

    text: str = ""


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A model's reasoning as another server encrypted it."""

    text: str


class ResponseMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of any role: a model's has output texts, all others have input texts."""

    id: str
    role: str
    content: list[InputText | OutputText]
    status: str = COMPLETED
    phase: str | msgspec.UnsetType = msgspec.UNSET
    """What a client called a model's message (`commentary`, `final_answer`): told again, and no more."""


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is a JSON object as text. `call_id` is what its output refers to."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = COMPLETED


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """The output of a called function."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: str = COMPLETED


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning of a model before it went on."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    status: str = COMPLETED


Item: TypeAlias = ResponseMessage | FunctionCall | FunctionCallOutput | Reasoning
OutputItem: TypeAlias = ResponseMessage | FunctionCall | Reasoning


class ItemPage(Page[Item]):
    """A page of a response's input, under the name that the OpenAPI document gives it."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Item])
_item_decoder: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)


def encode_items(items: list[Item]) -> bytes:
    """Items as JSON, for the store."""
    return _encoder.encode(items)


def decode_items(data: bytes) -> list[Item]:
    """What `encode_items` was given."""
    return _decoder.decode(data)


def decode_item(data: bytes) -> Item:
    """One of them."""
    return _item_decoder.decode(data)
