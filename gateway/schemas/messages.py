"""Chat messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field
from pydantic_core.core_schema import ValidationInfo

from gateway.schemas.base import FieldError, RequestModel, limits_of, plain_object

# What clients send back with an assistant's message, and what of it asks for nothing.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "tool_calls": (None, []),
    "function_call": (None,),
    "audio": (None,),
    "annotations": (None, []),
    "reasoning": (None, ""),
    "reasoning_content": (None, ""),
    "tool_call_id": (None,),
}
_OTHER_PARTS = frozenset(
    {
        "image_url",
        "input_image",
        "input_audio",
        "audio_url",
        "video_url",
        "file",
        "refusal",
        "image",
        "audio",
        "video",
    }
)


def _read_part(value: Any) -> Any:
    kind = plain_object(value).get("type")
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise FieldError(
            f"Invalid '{{param}}': content of type '{kind}' is not supported by this server yet.",
            "unsupported_parameter",
        )
    return value


def _read_content(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise FieldError(
            "Invalid type for '{param}': expected a string or an array of content parts.", "invalid_type"
        )
    if value == []:
        raise FieldError("Invalid '{param}': must not be an empty array.")
    return value


def few_parts(messages: Any, info: ValidationInfo) -> Any:
    """Refuse a chat with too many content parts before they are looked at. Raises FieldError."""
    most = limits_of(info).max_content_parts
    if isinstance(messages, list):
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        if sum(len(content) for content in contents if isinstance(content, list)) > most:
            raise FieldError(f"Invalid '{{param}}': at most {most} content parts are allowed.")
    return messages


def _read_message(value: Any) -> Any:
    message = plain_object(value)
    role = message.get("role")
    if role in ("tool", "function"):
        raise FieldError(
            f"Invalid '{{param}}': messages of role '{role}' are not supported by this server yet.",
            "unsupported_parameter",
        )
    kept = {}
    for name, item in message.items():
        if name not in _NEUTRAL_FIELDS:
            kept[name] = item
        elif not any(item == neutral for neutral in _NEUTRAL_FIELDS[name]):
            raise FieldError(
                f"Invalid '{{param}}': the field '{name}' is not supported by this server yet.",
                "unsupported_parameter",
            )
    return kept


class TextPart(RequestModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """One message. Parts are joined without a separator."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Annotated[TextPart, BeforeValidator(_read_part)]],
        FailFast(),
        BeforeValidator(_read_content),
    ] = Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})
    name: str | None = Field(None, max_length=256)

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts' texts."""
        return tuple(part.text for part in self.content)


Message = Annotated[ChatMessage, BeforeValidator(_read_message)]
