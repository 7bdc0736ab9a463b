"""What chats and plain completions have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from catenary.schema import MAX_CACHE_SALT
from gateway.errors import bad_request
from gateway.schemas.base import INT32_MAX, MODEL, at_most, within
from gateway.schemas.limits import RequestLimits
from gateway.schemas.output import OutputFields
from gateway.schemas.sampling import SamplingFields
from gateway.schemas.structured import StructuredFields


def _as_list(value: Any) -> Any:
    """A stop of no characters asks for nothing: it is what a form field that was left empty sends."""
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
        """Stop strings."""
        return tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request says so; 0: none, the prompt alone is asked for."""
        return self.max_tokens

    @property
    @abstractmethod
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None if log probabilities were not asked for."""

    @property
    def echoes(self) -> bool:
        """Whether the prompt is repeated in front of its choices."""
        return False

    @property
    def prompt_top_count(self) -> int | None:
        """Alternatives to ask for at each prompt token; None: no log probabilities of the prompt."""
        echoed = self.top_count if self.echoes else None
        asked = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(asked, default=None)

    @property
    def searches(self) -> bool:
        """Whether beams are searched for."""
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
