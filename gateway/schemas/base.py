"""What all request models have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import ApiError, bad_request
from gateway.schemas.limits import RequestLimits

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_FIELDS = 256


class FieldError(ValueError):
    """A problem with a field's value, in our own words; `{param}` in the text is the field's name.

    `at`: the field inside of the one that was looked at.
    """

    def __init__(self, text: str, code: str = "invalid_value", at: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.at = at

    def api_error(self, param: str) -> ApiError:
        """The 400 for it."""
        param = f"{param}.{self.at}" if self.at else param
        return bad_request(self.text.replace("{param}", param), param, self.code)


class RequestModel(BaseModel):
    """Strict: no conversion between types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    def check(self, limits: RequestLimits) -> None:
        """Checks across fields and against the operator's limits. Raises ApiError."""


def at_most(count: int) -> BeforeValidator:
    """Refuse a longer array or a larger object before its items are looked at: a million bad items must not
    become a million errors.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise FieldError(f"Invalid '{{param}}': at most {count} items are allowed.")
        return value

    return BeforeValidator(check)


def limits_of(info: ValidationInfo) -> RequestLimits:
    """The limits that a request is validated under. Raises TypeError outside of `parse_request`."""
    if not isinstance(info.context, RequestLimits):
        raise TypeError("requests are validated by parse_request only")
    return info.context


def within(limit: str) -> BeforeValidator:
    """The same with the operator's limit of that name."""

    def check(value: Any, info: ValidationInfo) -> Any:
        count = getattr(limits_of(info), limit)
        if isinstance(value, list) and len(value) > count:
            raise FieldError(f"Invalid '{{param}}': at most {count} items are allowed.")
        return value

    return BeforeValidator(check)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def plain_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object of moderate size. Raises FieldError."""
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected an object.", "invalid_type")
    if len(value) > MAX_FIELDS:
        raise FieldError(f"Invalid '{{param}}': at most {MAX_FIELDS} fields are allowed.")
    return value


class StreamOptions(RequestModel):
    """What a stream reports besides text."""

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Only false is supported.")


class GenerationFields(RequestModel):
    """Parameters that chat and plain completions share."""

    model: str = Field(min_length=1, description="Name of a served model.")
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="Nucleus mass.")
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="Keep the k best tokens; 0 and -1: all.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Least probability, as a share of the best token's.",
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        allow_inf_nan=False,
        description="Divides the logits of tokens of prompt and answer; 1 is off.",
    )
    n: int | None = Field(None, ge=1, le=128, description="Choices per prompt.")
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX, description="Seed of the sampler.")
    stop: Annotated[list[str] | None, at_most(4), BeforeValidator(_as_list)] = Field(
        None,
        description="One string, or up to 4, at which the text ends.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    )
    stop_token_ids: Annotated[list[int] | None, within("max_stop_token_ids")] = Field(
        None, description="Further token ids that end a choice."
    )
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: Annotated[StreamOptions | None, at_most(MAX_FIELDS)] = Field(
        None, description="Only with stream."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence token.")
    min_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Tokens before a stop is looked for."
    )
    user: str | None = Field(None, max_length=1024, description="Accepted; not used.")
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, description="Accepted; not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted; not used.")
    prompt_cache_key: str | None = Field(None, max_length=1024, description="Accepted; not used.")

    @property
    def choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request says so."""
        return self.max_tokens

    @property
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None if log probabilities were not asked for."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, limits: RequestLimits) -> None:
        if self.choices > limits.max_n:
            raise bad_request(f"Invalid 'n': must be at most {limits.max_n}.", "n")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
            if self.stream_options.include_obfuscation:
                raise bad_request(
                    "The parameter 'stream_options.include_obfuscation' is not supported by this server yet.",
                    "stream_options.include_obfuscation",
                    "unsupported_parameter",
                )
        self._check_stops(limits)
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise bad_request("Invalid 'min_tokens': must be at most 'max_tokens'.", "min_tokens")

    def _check_stops(self, limits: RequestLimits) -> None:
        for stop in self.stops:
            if not stop:
                raise bad_request("Invalid 'stop': strings must not be empty.", "stop")
            if len(stop) > limits.max_stop_length:
                raise bad_request(
                    f"Invalid 'stop': strings must have at most {limits.max_stop_length} characters.", "stop"
                )
        if any(token_id < 0 for token_id in self.stop_token_ids or ()):
            raise bad_request("Invalid 'stop_token_ids': ids must not be negative.", "stop_token_ids")
