"""Items of a response's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic.config import JsonDict

from gateway.schemas.base import ITEM_KINDS, FieldError, RequestModel, plain_object

_REFERENCE = "item_reference"
# Of ids and names, as in chats.
_MAX_NAME = 256
# Fields that clients send back with items that they received, with their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "caller": (None,),
    "namespace": (None,),
    "async": (None, False),
    "encrypted_content": (None,),
    "created_by": (None,),
}
Status = Literal["in_progress", "completed", "incomplete"]


def without_neutral(value: dict[str, Any], known: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Drop those of the `known` fields that have neutral values. Raises FieldError for other values."""
    kept = {}
    for name, item in value.items():
        if name not in known:
            kept[name] = item
        elif not any(item == neutral for neutral in known[name]):
            raise FieldError(
                f"Invalid '{{param}}': the field '{name}' is not supported by this server yet.",
                "unsupported_parameter",
            )
    return kept


def read_item(value: Any) -> Any:
    """Read an item with its type, which a message and a reference may omit. Raises FieldError."""
    item = without_neutral(plain_object(value), _NEUTRAL)
    if item.get("type") is None:
        item["type"] = _REFERENCE if item.keys() <= {"id", "type"} else "message"
    kind = item["type"]
    if not isinstance(kind, str):
        raise FieldError(
            "Invalid type for '{param}': expected an item whose 'type' is a string.", "invalid_type"
        )
    if kind not in ITEM_KINDS:
        raise FieldError(
            "Invalid '{param}': only items of type "
            + ", ".join(ITEM_KINDS)
            + " are supported by this server.",
            "unsupported_parameter",
        )
    return item


def _read_part(value: Any) -> Any:
    part = without_neutral(plain_object(value), _NEUTRAL)
    kind = part.get("type")
    if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
        raise FieldError(
            "Invalid '{param}': only content of type input_text and output_text is supported by this server.",
            "unsupported_parameter",
        )
    # Log probabilities and labels of an earlier answer have no effect on the next one.
    for name in ("logprobs", "annotations"):
        if isinstance(part.get(name), list | None):
            part.pop(name, None)
    return part


def _read_content(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise FieldError(
            "Invalid type for '{param}': expected a string or an array of content parts.", "invalid_type"
        )
    return value


class TextPart(RequestModel):
    """A piece of text, whatever the role of its message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = Annotated[
    list[Annotated[TextPart, BeforeValidator(_read_part)]], FailFast(), BeforeValidator(_read_content)
]
_CONTENT_SCHEMA: JsonDict = {"anyOf": [{"type": "string"}, {"type": "array"}]}


class MessageItem(RequestModel):
    """One turn of the conversation: its role and content."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field(min_length=1, json_schema_extra=_CONTENT_SCHEMA)
    id: str | None = Field(None, max_length=_MAX_NAME)
    status: Status | None = None
    phase: str | None = Field(
        None, max_length=_MAX_NAME, description="An assistant's label; kept, and not shown to the model."
    )


class FunctionCallItem(RequestModel):
    """A function that the model asked for."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=_MAX_NAME)
    name: str = Field(min_length=1, max_length=_MAX_NAME)
    arguments: str
    id: str | None = Field(None, max_length=_MAX_NAME)
    status: Status | None = None


class FunctionCallOutputItem(RequestModel):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=_MAX_NAME)
    output: Content = Field(json_schema_extra=_CONTENT_SCHEMA)
    id: str | None = Field(None, max_length=_MAX_NAME)
    status: Status | None = None


class ThoughtPart(RequestModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryPart(RequestModel):
    """A piece of a summary. It is kept with the item; the model is shown its own words alone."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], FailFast()] = Field(default_factory=list)
    content: Annotated[list[ThoughtPart] | None, FailFast()] = None
    id: str | None = Field(None, max_length=_MAX_NAME)
    status: Status | None = None


class ItemReference(RequestModel):
    """A stored item, of the input or the output of a response."""

    type: Literal["item_reference"]
    id: str = Field(min_length=1, max_length=_MAX_NAME)


WholeItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_kind),
]
