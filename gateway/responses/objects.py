"""The objects of the Responses API: a conversation's items, and the response."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gateway.errors import ApiError
from gateway.http.answers import Page
from gateway.streaming.answers import Usage
from gateway.streaming.delta import ChatLogprob

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
    """Label that a client gave a model's message (`commentary`, `final_answer`); it is only repeated."""


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


encode_items: Callable[[list[Item]], bytes] = msgspec.json.Encoder().encode
decode_items: Callable[[bytes], list[Item]] = msgspec.json.Decoder(list[Item]).decode
decode_item: Callable[[bytes], Item] = msgspec.json.Decoder(Item).decode


# The codes that OpenAI's schema allows here.
_ERROR_CODES = frozenset({"rate_limit_exceeded", "invalid_prompt"})
# The sampling that changes nothing.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class ResponseStatus(StrEnum):
    """Status of a response. The last four are final."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the response has ended."""
        return self not in (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    # Filling the cache is not accounted for; the schema wants the field.
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts; details are 0 where they are not known."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class InputTokens(msgspec.Struct):
    """The size of an input."""

    input_tokens: int
    object: str = "response.input_tokens"


class Response(msgspec.Struct, kw_only=True):
    """A response as the API shows it. What the request asked for is told again as it was understood."""

    id: str
    object: str = "response"
    created_at: int
    status: ResponseStatus
    completed_at: int | None = None
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    def fail(self, error: ApiError, at: int) -> None:
        """End with an error."""
        self.status = ResponseStatus.FAILED
        self.completed_at = at
        code = error.code if error.code in _ERROR_CODES else "server_error"
        self.error = ResponseError(code or "server_error", error.message)

    def finish(self, output: list[OutputItem], usage: Usage, *, cut: bool, at: int) -> None:
        """End with the model's output. `cut`: a limit stopped it."""
        self.status = ResponseStatus.INCOMPLETE if cut else ResponseStatus.COMPLETED
        self.completed_at = None if cut else at
        self.incomplete_details = IncompleteDetails("max_output_tokens") if cut else None
        self.output = output
        self.usage = response_usage(usage)


def response_usage(usage: Usage) -> ResponseUsage:
    """Convert token counts to those of this API."""
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(0 if prompt is None else prompt.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(0 if completion is None else completion.reasoning_tokens),
        usage.total_tokens,
    )


encode_response: Callable[[Response], bytes] = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Response)


def decode_response(data: bytes) -> Response:
    """Decode a response that this build or an older one encoded."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        found = msgspec.json.decode(data)
        return msgspec.convert(found | _sampling(found), Response)


def current_form(data: bytes) -> bytes:
    """Return a stored response as this build encodes it."""
    try:
        _decoder.decode(data)
    except msgspec.ValidationError:
        return encode_response(decode_response(data))
    return data


def _sampling(stored: dict[str, Any]) -> dict[str, float]:
    """Return the sampling of a stored response.

    Older builds stored no penalties, and null where a request left temperature or top_p to the model."""
    return {
        name: default if stored.get(name) is None else stored[name] for name, default in _SAMPLING.items()
    }
