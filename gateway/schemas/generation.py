"""Parameters of all generating routes: sampling, and the content and form of an answer."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from catenary.parameters import BIAS, LENGTH_PENALTY, PARAMETERS, SAMPLING
from catenary.sequence_limits import MAX_CACHE_SALT, MAX_TOP_LOGPROBS
from gateway.errors import bad_request
from gateway.schemas.base import (
    INT32_MAX,
    INT64_MAX,
    MAX_FIELDS,
    MODEL,
    FieldError,
    RequestLimits,
    RequestModel,
    at_most,
    limits_of,
    within,
)
from gateway.schemas.ignored import current_ignored
from gateway.schemas.structured import StructuredFields

# As JSON writes numbers: one id has one name.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_BIAS_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
)


def _read_bias(value: Any, info: ValidationInfo) -> dict[int, float] | None:
    """Read biases by token id. JSON has only texts for keys."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected an object.", "invalid_type")
    most = limits_of(info).max_logit_bias
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} tokens are allowed.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise FieldError(
                "Invalid '{param}': its keys must be token ids, without signs and leading zeros."
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FieldError("Invalid type for '{param}': its values must be numbers.", "invalid_type")
        if bias not in BIAS:
            raise FieldError("Invalid '{param}': its values must be between -100 and 100.")
        biases[int(key)] = float(bias)
    return biases


def _number(name: str, description: str, **other: float | None) -> Any:
    """Return the field of a number of the sampler, in its range but for `other` bounds."""
    numbers = PARAMETERS[name]
    bounds = {
        "gt": numbers.low if numbers.above else None,
        "ge": None if numbers.above else numbers.low,
        "le": None if numbers.high == math.inf else numbers.high,
        **other,
    }
    given: dict[str, Any] = {key: value for key, value in bounds.items() if value is not None}
    if not numbers.whole:
        given["allow_inf_nan"] = False
    return Field(None, **given, description=description)


class SamplingFields(RequestModel):
    """Temperature, filters, penalties, bias and bans, several samples, beam search."""

    temperature: float | None = _number("temperature", "0 is greedy.", le=2)
    top_p: float | None = _number("top_p", "Nucleus mass; 0: the best token alone.", ge=0, gt=None)
    top_k: int | None = _number("top_k", "Keep the k best tokens; 0 and -1: all.")
    min_p: float | None = _number("min_p", "Least probability, as a share of the best token's.")
    presence_penalty: float | None = _number("presence_penalty", "Taken from the logits of generated tokens.")
    frequency_penalty: float | None = _number(
        "frequency_penalty", "The same, as often as each was generated."
    )
    repetition_penalty: float | None = _number(
        "repetition_penalty", "Divides the logits of tokens of prompt and answer; 1 is off."
    )
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_read_bias), _BIAS_SCHEMA] = Field(
        None, description="Added to the logits of tokens, by their ids: -100 to 100."
    )
    bad_words: Annotated[list[str] | None, FailFast(), within("max_bad_words")] = Field(
        None, description="Texts that are not generated."
    )
    allowed_token_ids: Annotated[list[int] | None, FailFast(), within("max_allowed_token_ids")] = Field(
        None, min_length=1, description="Nothing but these tokens is generated."
    )
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX, description="Seed of the sampler.")
    n: int | None = Field(None, ge=1, le=128, description="Choices per prompt.")
    best_of: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Samples per prompt, of which the n most probable ones are returned; beams of a search.",
    )
    use_beam_search: bool | None = Field(None, description="Search for the most probable answers.")
    length_penalty: float | None = Field(
        None,
        ge=LENGTH_PENALTY.low,
        le=LENGTH_PENALTY.high,
        allow_inf_nan=False,
        description="Of a beam search: the power of the length.",
    )
    early_stopping: bool | None = Field(
        None, description="Of a beam search: end with the first finished beams."
    )

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def samples(self) -> int:
        """Samples, or beams, per prompt."""
        return self.best_of or self.choices

    def check(self, limits: RequestLimits) -> None:
        if self.choices > limits.max_n:
            raise bad_request(f"Invalid 'n': must be at most {limits.max_n}.", "n")
        if self.samples > limits.max_n:
            raise bad_request(f"Invalid 'best_of': must be at most {limits.max_n}.", "best_of")
        if self.best_of and self.samples < self.choices:
            raise bad_request("Invalid 'best_of': must be at least 'n'.", "best_of")
        if any(token_id < 0 for token_id in self.allowed_token_ids or ()):
            raise bad_request("Invalid 'allowed_token_ids': ids must not be negative.", "allowed_token_ids")
        for word in self.bad_words or ():
            if not word:
                raise bad_request("Invalid 'bad_words': words must not be empty.", "bad_words")
            if len(word) > limits.max_bad_word_length:
                raise bad_request(
                    f"Invalid 'bad_words': words must have at most {limits.max_bad_word_length} characters.",
                    "bad_words",
                )
        if self.use_beam_search:
            self._check_search()
        else:
            self._check_no_search()
        super().check(limits)

    def _check_search(self) -> None:
        """Refuse fields without an effect on a search, which draws nothing."""
        for name, one in SAMPLING.items():
            if one.draws and getattr(self, name) not in (None, *one.neutral):
                raise bad_request(f"'{name}' cannot be combined with 'use_beam_search'.", name)

    def _check_no_search(self) -> None:
        for name, given in (
            ("length_penalty", self.length_penalty not in (None, 1)),
            ("early_stopping", bool(self.early_stopping)),
        ):
            if given:
                raise bad_request(f"'{name}' is only allowed with 'use_beam_search'.", name)


class ObfuscationOptions(RequestModel):
    """Options of OpenAI's streams on every route."""

    include_obfuscation: bool | None = Field(None, description="Accepted; events are not padded.")

    def check_asked(self, *, stream: bool) -> None:
        """Raise ApiError if an option is set and there is no stream."""
        if not stream and any(value for _, value in self):
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.include_obfuscation:
            current_ignored().note("stream_options", "include_obfuscation")


class StreamOptions(ObfuscationOptions):
    """Reports of a stream in addition to text."""

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: send the request's usage so far with every chunk."
    )


class OutputFields(RequestModel):
    """Streaming, special tokens, token ids, log probabilities of the prompt."""

    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: Annotated[StreamOptions | None, at_most(MAX_FIELDS)] = Field(
        None, description="Only with stream."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text.")
    keep_special_tokens: bool | None = Field(None, description="The opposite of skip_special_tokens.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="false: no spaces between control tokens that are shown."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log probability of each prompt token and of so many alternatives.",
    )
    return_token_ids: bool | None = Field(None, description="Report the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log probabilities name tokens as token_id:N."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Keep the last so many tokens of a longer prompt; -1: as many as there is room for.",
    )

    @property
    def hides_special(self) -> bool:
        """Whether control tokens are left out of the text."""
        if self.skip_special_tokens is not None:
            return self.skip_special_tokens
        return not self.keep_special_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, limits: RequestLimits) -> None:
        if self.stream_options is not None:
            self.stream_options.check_asked(stream=bool(self.stream))
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("'prompt_logprobs' is not allowed when 'stream' is true.", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise bad_request(
                "Invalid 'truncate_prompt_tokens': must be at least 1, or -1.", "truncate_prompt_tokens"
            )
        both = (self.skip_special_tokens, self.keep_special_tokens)
        if None not in both and both[0] == both[1]:
            raise bad_request(
                "'keep_special_tokens' contradicts 'skip_special_tokens'.", "keep_special_tokens"
            )
        super().check(limits)


def _as_list(value: Any) -> Any:
    """Drop a stop without characters, which a form sends for an empty field."""
    if isinstance(value, list):
        return [item for item in value if item != ""]
    return [value] if value and isinstance(value, str) else None if value == "" else value


class GenerationFields(SamplingFields, OutputFields, StructuredFields):
    """Parameters that chat and plain completions share."""

    model: str = MODEL
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="Most tokens to generate.")
    min_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Tokens before a stop is looked for."
    )
    stop: Annotated[list[str] | None, at_most(4), BeforeValidator(_as_list)] = Field(
        None,
        description="One string, or up to 4, at which the text ends.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    )
    stop_token_ids: Annotated[list[int] | None, within("max_stop_token_ids")] = Field(
        None, description="Further token ids that end a choice."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence token.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The stop string, or the stop token's text, is part of the text."
    )
    priority: int | None = Field(
        None, ge=-INT32_MAX, le=INT32_MAX, description="Requests with a lower number are computed first."
    )
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="flex: computed after others; priority: before others."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="Cached prompts are shared only with requests that have the same one.",
    )
    user: str | None = Field(
        None,
        max_length=1024,
        description="Names the session, if no prompt_cache_key does: one engine for all.",
    )
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, description="Accepted; not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted; not used.")
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="Names the session: its requests go to one engine if they can."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request limits them; 0: only the prompt is requested."""
        return self.max_tokens

    @property
    @abstractmethod
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None: no log probabilities."""

    @property
    def echoes(self) -> bool:
        return False

    @property
    def prompt_top_count(self) -> int | None:
        """Alternatives to request at each prompt token; None: no log probabilities of the prompt."""
        echoed = self.top_count if self.echoes else None
        asked = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(asked, default=None)

    @property
    def searches(self) -> bool:
        return bool(self.use_beam_search) and self.token_limit != 0

    @property
    def tier(self) -> str | None:
        """The service tier that the answer names, if the request chose one."""
        return "default" if self.service_tier == "auto" else self.service_tier

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self._check_stops(limits)
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise bad_request("Invalid 'min_tokens': must be at most 'max_tokens'.", "min_tokens")
        low, high = limits.min_priority, limits.max_priority
        if self.priority is not None and not low <= self.priority <= high:
            raise bad_request(f"Invalid 'priority': must be between {low} and {high}.", "priority")
        if self.searches:
            self._check_alone()
        elif self.stream and self.samples > self.choices:
            raise bad_request("'best_of' above 'n' is not allowed when 'stream' is true.", "best_of")

    def _check_alone(self) -> None:
        for name, given in (
            ("stop", bool(self.stops)),
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("echo", self.prompt_top_count is not None),
        ):
            if given:
                what = "'echo' with log probabilities" if name == "echo" else f"'{name}'"
                raise bad_request(f"{what} cannot be combined with 'use_beam_search'.", name)

    def _check_stops(self, limits: RequestLimits) -> None:
        for stop in self.stops:
            if len(stop) > limits.max_stop_length:
                raise bad_request(
                    f"Invalid 'stop': strings must have at most {limits.max_stop_length} characters.", "stop"
                )
        if any(token_id < 0 for token_id in self.stop_token_ids or ()):
            raise bad_request("Invalid 'stop_token_ids': ids must not be negative.", "stop_token_ids")
