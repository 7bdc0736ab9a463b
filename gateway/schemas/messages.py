"""Chat messages: what each role may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core.core_schema import ValidationInfo

from gateway.schemas.base import DEPRECATED, FieldError, RequestModel, at_most, limits_of, plain_object

# Of one message: --max-tool-calls bounds a request. An id or a name is not longer in any format of calls.
MAX_CALLS = 1024
MAX_ID = 256
# What clients send back with an assistant's message, and what of it asks for nothing.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
}
# Labels that a server put on an answer: they say nothing about what comes next.
_LABELS = frozenset({"annotations"})
# What is the same as to leave the field out.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "content": (None,),
    "name": (None,),
    "refusal": (None, ""),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "function_call": (None,),
    "reasoning": (None, ""),
    "reasoning_content": (None, ""),
}
_OTHER_PARTS = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "image", "audio", "video"}
)
_MAY_SAY_NOTHING = ("assistant", "tool", "function")
_ASSISTANTS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")


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


def _read_call(value: Any) -> Any:
    call = plain_object(value)
    kind = call.get("type")
    if isinstance(kind, str) and kind != "function":
        raise FieldError(
            "Invalid '{param}': only calls of type 'function' are supported by this server yet.",
            "unsupported_parameter",
        )
    # Some clients keep a call's place in the stream that it came in; here it has one.
    return {name: item for name, item in call.items() if name != "index" or type(item) is not int}


def _read_message(value: Any) -> Any:
    message = plain_object(value)
    kept = {}
    for name, item in message.items():
        if name in _NEUTRAL_FIELDS:
            if not any(item == neutral for neutral in _NEUTRAL_FIELDS[name]):
                raise FieldError(
                    "Invalid '{param}': this field is not supported by this server yet.",
                    "unsupported_parameter",
                    name,
                )
        elif name in _LABELS and (item is None or isinstance(item, list)):
            continue
        elif name == "content" and item == [] and message.get("role") in _MAY_SAY_NOTHING:
            # A tool that gave nothing is told as nothing; beside calls no text is needed.
            if message["role"] == "tool":
                kept[name] = ""
        elif not any(item == absent and type(item) is type(absent) for absent in _ABSENT.get(name, ())):
            kept[name] = item
    return kept


def few_parts(messages: Any, info: ValidationInfo) -> Any:
    """Refuse a chat with too many content parts or calls before they are looked at. Raises FieldError."""
    limits = limits_of(info)
    if isinstance(messages, list):
        for field, most, what in (
            ("content", limits.max_content_parts, "content parts"),
            ("tool_calls", limits.max_tool_calls, "tool calls"),
        ):
            lists = (message.get(field) for message in messages if isinstance(message, dict))
            if sum(len(items) for items in lists if isinstance(items, list)) > most:
                raise FieldError(f"Invalid '{{param}}': at most {most} {what} are allowed.")
    return messages


class ContentPart(RequestModel):
    """A piece of text, or of an assistant's refusal, which is text too."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        other = "refusal" if self.type == "text" else "text"
        if getattr(self, other) is not None:
            raise FieldError(f"Invalid '{{param}}': a part of type '{self.type}' has no '{other}'.")
        if getattr(self, self.type) is None:
            raise FieldError(
                "Missing required parameter: '{param}'.", "missing_required_parameter", self.type
            )
        return self

    @property
    def shown(self) -> str:
        """The text."""
        return self.text or self.refusal or ""


class CalledFunction(RequestModel):
    """Whom a call was for, and with what."""

    name: str = Field(min_length=1, max_length=MAX_ID)
    arguments: str = Field(description="A JSON object as text, or what there is of one that was cut.")


class ToolCall(RequestModel):
    """A call that the assistant made."""

    id: str = Field(min_length=1, max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(RequestModel):
    """One message. Parts are joined without a separator.

    Only an assistant's has calls, reasoning (under either name) and a refusal, and need not have content
    then; only a tool's has the id of the call that it answers. A function's, which OpenAI had before tools,
    has its name.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        list[Annotated[ContentPart, BeforeValidator(_read_part)]] | None,
        FailFast(),
        BeforeValidator(_read_content),
    ] = Field(None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]})
    name: str | None = Field(None, max_length=MAX_ID)
    tool_calls: Annotated[
        list[Annotated[ToolCall, BeforeValidator(_read_call)]] | None, FailFast(), at_most(MAX_CALLS)
    ] = None
    tool_call_id: str | None = Field(None, min_length=1, max_length=MAX_ID)
    function_call: CalledFunction | None = Field(None, json_schema_extra=DEPRECATED)
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        assistant = self.role == "assistant"
        for name in () if assistant else _ASSISTANTS:
            if getattr(self, name) is not None:
                raise FieldError("Invalid '{param}': only an assistant's message may have it.", at=name)
        if not assistant and any(part.type == "refusal" for part in self.content or ()):
            raise FieldError("Invalid '{param}': only an assistant's message may refuse.", at="content")
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError(
                "Missing required parameter: '{param}'.", "missing_required_parameter", "tool_call_id"
            )
        if self.role != "tool" and self.tool_call_id is not None:
            raise FieldError("Invalid '{param}': only a tool's message may have it.", at="tool_call_id")
        if None not in (self.tool_calls, self.function_call):
            raise FieldError("Invalid '{param}': not allowed beside 'tool_calls'.", at="function_call")
        if self.role == "function" and not self.name:
            raise FieldError("Missing required parameter: '{param}'.", "missing_required_parameter", "name")
        # What a function gave may be nothing.
        says = self.role == "function" or (
            assistant and any(getattr(self, name) is not None for name in _ASSISTANTS)
        )
        if self.content is None and not says:
            raise FieldError(
                "Missing required parameter: '{param}'.", "missing_required_parameter", "content"
            )
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            raise FieldError("Invalid '{param}': it differs from 'reasoning_content'.", at="reasoning")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """What the message says, in pieces: its parts' texts, and a refusal after them."""
        parts = tuple(part.shown for part in self.content or ())
        return parts if self.refusal is None else (*parts, self.refusal)

    @property
    def thoughts(self) -> str | None:
        """The reasoning, under whichever name it came."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


Message = Annotated[ChatMessage, BeforeValidator(_read_message)]
