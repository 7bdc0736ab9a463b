"""`POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field
from pydantic_core.core_schema import ValidationInfo

from catenary.schema import MAX_TOP_LOGPROBS
from gateway.errors import bad_request
from gateway.schemas.base import (
    INT32_MAX,
    MAX_FIELDS,
    FieldError,
    RequestModel,
    at_most,
    limits_of,
    plain_object,
    within,
)
from gateway.schemas.chat import ChatRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.response_items import InputItem, read_item, without_neutral
from gateway.schemas.unsupported import RESPONSES, drop_neutral, unsupported_parameter

OUTPUT_LOGPROBS = "message.output_text.logprobs"
MAX_ID_LENGTH = 128
_MAX_KEY = 64
_MAX_VALUE = 512
_MAX_INCLUDE = 16
# Fields that are known and not supported, with the values that ask for nothing.
_TOOL = {
    "allowed_callers": (None,),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}
_TEXT = {"verbosity": ("medium",)}
_REASONING: dict[str, tuple[str, ...]] = {
    "context": ("auto",),
    "generate_summary": (),
    "mode": ("standard",),
    "summary": (),
}
CHAT_PARAMETERS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_json_object",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "keep_special_tokens",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
        "truncate_prompt_tokens",
    }
)
"""Parameters of chats that are no parameters of OpenAI's responses. They mean here what they mean there."""


def _read_input(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise FieldError(
            "Invalid type for '{param}': expected a string or an array of items.", "invalid_type"
        )
    most = limits_of(info).max_content_parts
    if sum(map(_parts, value)) > most:
        # Before any is looked at: a million of them take their time.
        raise FieldError(f"Invalid '{{param}}': at most {most} content parts are allowed.")
    return value


def _parts(item: Any) -> int:
    if not isinstance(item, dict):
        return 0
    found = (item.get(name) for name in ("content", "output", "summary"))
    return sum(len(parts) for parts in found if isinstance(parts, list))


def _read_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise FieldError(
            "Invalid '{param}': only tools of type 'function' are supported by this server.",
            "unsupported_parameter",
        )
    return without_neutral(plain_object(value), _TOOL)


def _known(prefix: str, known: Mapping[str, Sequence[Any]]) -> BeforeValidator:
    return BeforeValidator(
        lambda value: drop_neutral(value, known, prefix) if isinstance(value, dict) else value
    )


class FunctionTool(RequestModel):
    """A function that the model may ask for."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(
        None, description="JSON schema of the arguments."
    )
    strict: bool | None = Field(None, description="Hold the arguments to the schema.")


class TextFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="With json_schema: its name.")
    description: str | None = None
    # `schema` is a method of pydantic's models.
    json_schema_: Annotated[dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """What the text of the answer is to be like."""

    format: Annotated[TextFormat | None, at_most(MAX_FIELDS)] = None


class ReasoningOptions(RequestModel):
    """How much the model is to think."""

    effort: str | None = Field(None, max_length=32)


class ResponseChat(ChatRequest):
    """The chat that answers a request."""

    truncation: Literal["auto"] | None = None


class StreamOptions(RequestModel):
    """What a stream has besides the events."""

    include_obfuscation: bool | None = Field(None, description="Only false is supported.")


class ResponsesRequest(RequestModel):
    """What a response is made from. Parameters of a chat that are not named here go on to the chat."""

    unsupported = RESPONSES

    model: str = Field(min_length=1, description="Name of a served model.")
    input: Annotated[
        list[Annotated[InputItem, BeforeValidator(read_item)]],
        FailFast(),
        BeforeValidator(_read_input),
        within("max_messages"),
    ] = Field(
        min_length=1,
        description="A text, or items: messages, calls of functions, their outputs, reasoning.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]},
    )
    instructions: str | None = Field(None, description="A system message in front of everything.")
    previous_response_id: str | None = Field(
        None, min_length=1, max_length=MAX_ID_LENGTH, description="A stored response to go on from."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="Nucleus mass.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Report so many alternatives for each token."
    )
    include: Annotated[list[str] | None, at_most(_MAX_INCLUDE)] = Field(
        None, description=f"Only {OUTPUT_LOGPROBS} is supported."
    )
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(_read_tool), at_most(MAX_FIELDS)]] | None,
        FailFast(),
        within("max_tools"),
    ] = Field(None, description="Functions that the model may ask for.")
    tool_choice: Annotated[str | dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(
        None, description="none, auto, required, or a function by name."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether several calls may come at once.")
    text: Annotated[TextOptions | None, _known("text.", _TEXT), at_most(MAX_FIELDS)] = Field(
        None, description="Form of the answer."
    )
    reasoning: Annotated[ReasoningOptions | None, _known("reasoning.", _REASONING), at_most(MAX_FIELDS)] = (
        Field(None, description="How much to think.")
    )
    truncation: Literal["disabled", "auto"] | None = Field(
        None,
        description="auto: the oldest turns of what is too long are left out. Default: it is refused.",
    )
    store: bool | None = Field(None, description="Keep the response, to be read or gone on from later.")
    background: bool | None = Field(None, description="Answer at once and go on; read the response later.")
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: Annotated[StreamOptions | None, at_most(MAX_FIELDS)] = Field(
        None, description="Only with stream."
    )
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(
        None, description="Kept with the response."
    )
    user: str | None = Field(None, max_length=1024, description="As in chats.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Told again; not used.")
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="As in chats: names the session; told again."
    )
    service_tier: str | None = Field(None, max_length=32, description="As in chats.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to be listed."""
        return OUTPUT_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self, limits: RequestLimits) -> None:
        for index, name in enumerate(self.include or ()):
            if name != OUTPUT_LOGPROBS:
                raise unsupported_parameter(f"include.{index}")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
            if self.stream_options.include_obfuscation:
                raise unsupported_parameter("stream_options.include_obfuscation")
        if self.background and self.store is False:
            raise bad_request("'background' needs 'store': such a response can only be read later.", "store")
        self._check_metadata()

    def _check_metadata(self) -> None:
        for key, value in (self.metadata or {}).items():
            if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
                raise bad_request(
                    f"Invalid 'metadata': keys must have at most {_MAX_KEY} characters and values at most "
                    f"{_MAX_VALUE}.",
                    "metadata",
                )
