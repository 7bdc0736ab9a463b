"""Bodies of chats: messages, and the parameters of a chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core.core_schema import ValidationInfo

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from gateway.errors import ApiError, bad_request
from gateway.schemas.base import (
    BOUNDED,
    DEPRECATED,
    INT32_MAX,
    MAX_FIELDS,
    MODEL,
    FieldError,
    RequestLimits,
    RequestModel,
    at_most,
    limits_of,
    plain_object,
    within,
)
from gateway.schemas.generation import GenerationFields
from gateway.schemas.ignored import (
    CHAT,
    CHAT_EMBEDDING_FIELDS,
    CHAT_FIELDS,
    OTHERS_COUNTERPARTS,
    TOKENIZE,
    current_ignored,
    tree_of,
    unsupported_parameter,
)
from gateway.schemas.tools import ToolFields, ToolListFields

# Of one message: --max-tool-calls bounds a request. An id or a name is not longer in any format of calls.
MAX_CALLS = 1024
MAX_ID = 256
# Fields that clients send back with an assistant's message, with their neutral values.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
}
# Labels that a server put on an answer: they have no effect on the next one.
_LABELS = frozenset({"annotations"})
# Values that equal a missing field.
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
    # Some clients keep a call's index in its stream; a list has its own order.
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
            # A missing result is shown as an empty one; a message with calls needs no text.
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
        return self.text or self.refusal or ""


class CalledFunction(RequestModel):
    """Name of the called function, and its arguments."""

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
        # The result of a function may be empty.
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
        """The message's texts, in pieces: its parts' texts, and a refusal after them."""
        parts = tuple(part.shown for part in self.content or ())
        return parts if self.refusal is None else (*parts, self.refusal)

    @property
    def thoughts(self) -> str | None:
        """Reasoning, under whichever name it came."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


Message = Annotated[ChatMessage, BeforeValidator(_read_message)]


_EFFORT = "reasoning_effort"
# Variables with which templates switch thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_READ_FOR_THINKING = frozenset({_EFFORT, *_SWITCHES})
# Characters of a variable that an error names.
MAX_SHOWN_NAME = 64


class Thinking(RequestModel):
    """Whether to think, as Anthropic, DeepSeek and GLM have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=INT32_MAX, description="Only where it has no effect.")


class ChatInputFields(ToolListFields):
    """Fields of every request that a chat template renders."""

    effort_param: ClassVar[str] = _EFFORT
    """Name of the effort field."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(few_parts), within("max_messages")] = (
        Field(min_length=1, description="The chat so far.")
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's turn. Default: true, without continue_final_message."
    )
    continue_final_message: bool | None = Field(None, description="Go on inside of the last message.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the tokenizer puts around a text, as its BOS. Default: false.",
    )
    documents: Annotated[list[dict[str, Any]] | None, BOUNDED, within("max_documents")] = Field(
        None, description="Documents for the template."
    )
    chat_template: str | None = Field(
        None, min_length=1, description="Name of one of the model's templates, or a template if allowed."
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, BOUNDED, at_most(MAX_FIELDS)] = Field(
        None, description="Variables that the model's chat template reads."
    )
    thinking: Annotated[Thinking | None, at_most(MAX_FIELDS)] = Field(
        None, description="Whether to think first, if the model's chat template has a switch for it."
    )
    think: bool | None = Field(None, description="The same as thinking, as Ollama has it.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much to think first, if the model's chat template knows of it."
    )

    def check_chat_input(self) -> None:
        """Check across these fields. Raises ApiError."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' is not allowed when 'add_generation_prompt' is true.",
                "continue_final_message",
            )
        thinks, param = self._thinking()
        if None not in (thinks, self.reasoning_effort) and thinks is (self.reasoning_effort == "none"):
            raise bad_request(f"'{param}' says something else than '{_EFFORT}'.", param)

    def _thinking(self) -> tuple[bool | None, str]:
        """Return whether to think, if the request says so by another field than an effort, and that field's
        name.

        Raises ApiError for two that contradict each other."""
        if self.thinking is None:
            return self.think, "think"
        thinks = self.thinking.type != "disabled"
        if self.think not in (None, thinks):
            raise bad_request("'think' says something else than 'thinking'.", "think")
        return thinks, "thinking"

    def template_variables(self, known: frozenset[str]) -> dict[str, Any]:
        """Return variables for the template, without those that change nothing. Raises ApiError for one that
        is not among `known`, the model's.

        Only the tokenizer service knows the variables of a template that the request brings."""
        given = dict(self.chat_template_kwargs or {})
        if self.chat_template is None:
            for name in sorted(given.keys() - known):
                # A template without a switch thinks as the model does, with whatever value.
                if not current_ignored().lenient and (name not in _SWITCHES or known & _READ_FOR_THINKING):
                    raise _unread(name)
                current_ignored().note("chat_template_kwargs", name)
                del given[name]
        known |= given.keys()
        for param, wanted in (
            (self.effort_param, self._effort(known)),
            (self._thinking()[1], self._switched(known)),
        ):
            for name, value in wanted.items():
                if given.setdefault(name, value) != value:
                    raise bad_request(
                        f"'{param}' says something else than 'chat_template_kwargs.{name}'.", param
                    )
        return given

    def _effort(self, known: frozenset[str]) -> dict[str, Any]:
        """Return the effort's variables. A template without efforts may still know whether to think."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        if _EFFORT in known or self.chat_template is not None:
            return {_EFFORT: effort}
        if (switch := _switch(known)) is not None:
            return {switch: effort != "none"}
        if effort != "none":
            current_ignored().note(*self.effort_param.split("."))
        return {}

    def _switched(self, known: frozenset[str]) -> dict[str, Any]:
        """Return the variables that `thinking` or `think` asks for."""
        thinks, param = self._thinking()
        if thinks is None:
            return {}
        switch = _switch(known) if self.chat_template is None else _SWITCHES[0]
        if switch is None and _EFFORT not in known:
            if thinks:
                current_ignored().note(param)
            return {}
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            raise unsupported_parameter("thinking.budget_tokens")
        if switch is not None:
            return {switch: thinks}
        # Whether it thinks at all is left to the effort, of which the template has a default.
        return {} if thinks else {_EFFORT: "none"}


def _switch(known: frozenset[str]) -> str | None:
    """Return the variable by which a template is told whether to think."""
    return next((name for name in _SWITCHES if name in known), None)


class TokenizeChatRequest(ChatInputFields):
    """`POST /tokenize` of a chat."""

    unsupported = TOKENIZE
    ignored = tree_of(CHAT_EMBEDDING_FIELDS)

    model: str = MODEL
    return_token_strs: bool | None = Field(None, description="Give the tokens' spellings too.")

    def check(self, limits: RequestLimits) -> None:
        self.check_chat_input()
        self.check_tools(limits)


def _unread(name: str) -> ApiError:
    shown = name.isascii() and name.isidentifier() and len(name) <= MAX_SHOWN_NAME
    return bad_request(
        "The model's chat template does not read this variable, or a request may not set it.",
        f"chat_template_kwargs.{name}" if shown else "chat_template_kwargs",
        "unknown_parameter",
    )


class ChatRequest(GenerationFields, ToolFields, ChatInputFields):
    """A chat to go on with."""

    unsupported = CHAT
    ignored = tree_of(CHAT_FIELDS)
    other_names = {
        **OTHERS_COUNTERPARTS,
        "n_probs": "top_logprobs",
        "input": "messages",
        "instructions": "messages",
        "prompt": "messages",
        "max_output_tokens": "max_completion_tokens",
        "text": "response_format",
    }

    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=INT32_MAX,
        description="Most tokens to generate; with max_tokens the smaller one counts.",
    )
    logprobs: bool | None = Field(None, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With logprobs: report so many alternatives for each token.",
    )

    @property
    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
