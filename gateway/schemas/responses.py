"""`POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag
from pydantic_core.core_schema import ValidationInfo

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from gateway.errors import ApiError, bad_request
from gateway.schemas.base import (
    DEPRECATED,
    FUNCTION_TAG,
    INT32_MAX,
    MAX_FIELDS,
    MODEL,
    OTHER_TAG,
    FieldError,
    RequestLimits,
    RequestModel,
    at_most,
    limits_of,
    plain_object,
    within,
)
from gateway.schemas.chat import ChatRequest
from gateway.schemas.generation import ObfuscationOptions
from gateway.schemas.ignored import (
    OTHERS_COUNTERPARTS,
    RESPONSE_FIELDS,
    RESPONSES,
    current_ignored,
    drop_neutral,
    tree_of,
    unsupported_parameter,
)
from gateway.schemas.response_items import (
    InputItem,
    read_item,
    without_neutral,
)

OUTPUT_LOGPROBS = "message.output_text.logprobs"
# Of ids, which are ours and shorter; of metadata and `include`, OpenAI's own, in its API reference.
MAX_ID_LENGTH = 128
_MAX_KEY = 64
_MAX_VALUE = 512
_MAX_INCLUDE = 16
# Fields that are known and not supported, with their neutral values.
_TOOL = {
    "allowed_callers": (None,),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}
# Tools that OpenAI's servers run, or that a model must have been trained for: they are not offered.
OTHER_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
_ENCRYPTED = "reasoning.encrypted_content"
# Values of `include` for items that never occur here, and for reasoning, which is never encrypted.
_NOTHING_TO_INCLUDE = frozenset(
    {
        _ENCRYPTED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
INCLUDABLE = (OUTPUT_LOGPROBS, *sorted(_NOTHING_TO_INCLUDE))
"""Values of `include`. Only the first has an effect."""
_REASONING: dict[str, tuple[str, ...]] = {
    "context": ("auto",),
    "mode": ("standard",),
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
        "think",
        "thinking",
        "top_k",
        "truncate_prompt_tokens",
    }
)
"""Parameters of chats that are no parameters of OpenAI's responses. They mean here what they mean there."""
BY_CHAT_NAME = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Parameters of responses that have another name in chats, by that name."""


def _read_input(value: Any, info: ValidationInfo) -> Any:
    if value is None:
        return []
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
    tool = plain_object(value)
    kind = tool.get("type")
    if isinstance(kind, str) and kind in OTHER_TOOLS:
        return tool
    if isinstance(kind, str) and kind != "function":
        raise FieldError(
            "Invalid '{param}': only tools of type 'function' are supported by this server.",
            "unsupported_parameter",
        )
    return without_neutral(tool, _TOOL)


def _known(prefix: str, known: Mapping[str, Sequence[Any]]) -> BeforeValidator:
    return BeforeValidator(
        lambda value: drop_neutral(value, known, prefix) if isinstance(value, dict) else value
    )


class ResponseTool(RequestModel):
    """A function that the model may ask for."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(
        None, description="JSON schema of the arguments."
    )
    strict: bool | None = Field(None, description="Hold the arguments to the schema.")


class OtherTool(RequestModel):
    """A tool that is not offered to the model, whatever else is said of it."""

    model_config = ConfigDict(extra="ignore")
    opaque = True

    type: str


def _is_other(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind in OTHER_TOOLS


def _not_offered(param: str, tools: Sequence[Any]) -> ApiError:
    kinds = ", ".join(f"'{kind}'" for kind in sorted({tool["type"] for tool in tools}))
    return bad_request(
        f"Invalid '{param}': tools of type {kinds} are not supported by this server, which ignores them; "
        "only those of type 'function' can be called.",
        param,
        "unsupported_value",
    )


def _tool_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return OTHER_TAG if isinstance(kind, str) and kind in OTHER_TOOLS else FUNCTION_TAG


Tool = Annotated[
    Annotated[ResponseTool, Tag(FUNCTION_TAG)] | Annotated[OtherTool, Tag(OTHER_TAG)],
    Discriminator(_tool_tag),
]


class TextFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="With json_schema: its name.")
    description: str | None = None
    # `schema` is a method of pydantic's models.
    json_schema_: Annotated[dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """Format of the answer's text."""

    format: Annotated[TextFormat | None, at_most(MAX_FIELDS)] = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Returned as it came; no model is known to heed it."
    )


class ReasoningOptions(RequestModel):
    """How much the model is to think."""

    effort: str | None = Field(None, max_length=32)
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Returned as it came; no summaries are made."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of summary.", json_schema_extra=DEPRECATED
    )


class ResponseChat(ChatRequest):
    """The chat that answers a request."""

    effort_param = "reasoning.effort"

    truncation: Literal["auto"] | None = None


class ResponsesRequest(RequestModel):
    """Request for a response. Parameters of a chat that are not named here go on to the chat."""

    unsupported = RESPONSES
    ignored = tree_of(RESPONSE_FIELDS)
    other_names = {
        **OTHERS_COUNTERPARTS,
        **BY_CHAT_NAME,
        "n_predict": "max_output_tokens",
        "n_probs": "top_logprobs",
    }

    model: str = MODEL
    input: Annotated[
        list[Annotated[InputItem, BeforeValidator(read_item)]],
        FailFast(),
        BeforeValidator(_read_input),
        within("max_messages"),
    ] = Field(
        default_factory=list,
        description="A text, or items: messages, calls of functions, their outputs, reasoning. It may be "
        "left out beside instructions or a previous response.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    )
    instructions: str | None = Field(None, description="A system message in front of everything.")
    previous_response_id: str | None = Field(
        None, min_length=1, max_length=MAX_ID_LENGTH, description="A stored response to go on from."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")
    top_p: float | None = Field(
        None, ge=0, le=1, allow_inf_nan=False, description="Nucleus mass; 0: the best token alone."
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Report so many alternatives for each token."
    )
    include: Annotated[list[str] | None, at_most(_MAX_INCLUDE)] = Field(
        None, description=f"Only {OUTPUT_LOGPROBS} has an effect."
    )
    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(_read_tool), at_most(MAX_FIELDS)]] | None,
        FailFast(),
        within("max_tools"),
    ] = Field(
        None,
        description="Functions that the model may ask for. Tools of other types are taken and not offered.",
    )
    max_tool_calls: int | None = Field(
        None,
        ge=0,
        le=INT32_MAX,
        description="Limits built-in tools, of which there are none; returned as it came.",
    )
    tool_choice: Annotated[str | dict[str, Any] | None, at_most(MAX_FIELDS)] = Field(
        None, description="none, auto, required, or a function by name."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether several calls may come at once.")
    text: Annotated[TextOptions | None, at_most(MAX_FIELDS)] = Field(None, description="Form of the answer.")
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
    stream_options: Annotated[ObfuscationOptions | None, at_most(MAX_FIELDS)] = Field(
        None, description="Only with stream."
    )
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(
        None, description="Kept with the response."
    )
    user: str | None = Field(None, max_length=1024, description="As in chats.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Returned as it came; not used.")
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="As in chats: names the session; told again."
    )
    service_tier: str | None = Field(None, max_length=32, description="As in chats.")

    @classmethod
    def known_names(cls) -> set[str]:
        return super().known_names() | CHAT_PARAMETERS

    @property
    def functions(self) -> dict[int, ResponseTool]:
        """Offered tools, by their places."""
        tools = enumerate(self.tools or ())
        return {place: tool for place, tool in tools if isinstance(tool, ResponseTool)}

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self, limits: RequestLimits) -> None:
        if not self.input and self.instructions is None and self.previous_response_id is None:
            raise bad_request("Missing required parameter: 'input'.", "input", "missing_required_parameter")
        if self.stream_options is not None:
            self.stream_options.check_asked(stream=bool(self.stream))
        if self.background and self.store is False:
            raise bad_request("'background' needs 'store': such a response can only be read later.", "store")
        self._check_metadata()
        self._check_choice()
        self._note_ignored()

    def _check_choice(self) -> None:
        """Refuse to choose among tools that are not offered. The rest is checked with the chat."""
        choice = self.tool_choice
        mode = choice.get("type") if isinstance(choice, dict) else choice
        if _is_other(choice):
            raise _not_offered("tool_choice.type", [choice])
        allowed = choice.get("tools") if isinstance(choice, dict) else None
        if mode == "allowed_tools" and isinstance(allowed, list) and allowed and all(map(_is_other, allowed)):
            raise _not_offered("tool_choice.tools", allowed)
        if self.tools and not self.functions and mode not in (None, "none", "auto"):
            raise _not_offered("tool_choice", [tool.model_dump() for tool in self.tools])

    def _note_ignored(self) -> None:
        """Note the fields without effect. Raises ApiError for an unknown value of `include`."""
        ignored = current_ignored()
        for place, name in enumerate(self.include or ()):
            if name in _NOTHING_TO_INCLUDE:
                ignored.note("include", place)
            elif name != OUTPUT_LOGPROBS:
                raise unsupported_parameter(f"include.{place}")
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherTool):
                ignored.note("tools", place)
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            ignored.note("text", "verbosity")
        for name in ("summary", "generate_summary"):
            if getattr(self.reasoning, name, None) is not None:
                ignored.note("reasoning", name)

    def _check_metadata(self) -> None:
        for key, value in (self.metadata or {}).items():
            if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
                raise bad_request(
                    f"Invalid 'metadata': keys must have at most {_MAX_KEY} characters and values at most "
                    f"{_MAX_VALUE}.",
                    "metadata",
                )
