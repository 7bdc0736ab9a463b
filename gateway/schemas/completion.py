"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.errors import bad_request
from gateway.schemas.base import FieldError, GenerationFields
from gateway.schemas.limits import RequestLimits

DEFAULT_MAX_TOKENS = 16
_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def _read_prompt(value: Any) -> list[str] | list[list[int]]:
    """Every form of `prompt` as a list of prompts of one kind."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    if value and _is_ids(value):
        value = [value]
    if not all(isinstance(item, str) for item in value) and not all(
        isinstance(item, list) and _is_ids(item) for item in value
    ):
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    if not value or not all(value):
        raise FieldError("Invalid '{param}': prompts must not be empty.")
    return list(value)


def _is_ids(value: list[Any]) -> bool:
    # type(), because True is an int to isinstance().
    return all(type(item) is int for item in value)


class CompletionRequest(GenerationFields):
    """A text to go on with."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_read_prompt)] = Field(
        description="Prompts, as text or as token ids. Text that spells a control token is that token.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]},
    )
    logprobs: int | None = Field(
        None, ge=0, le=5, description="Report the log probability of each token and of so many alternatives."
    )
    best_of: int | None = Field(None, ge=1, le=20, description="Only the value of n is supported.")

    @property
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None if log probabilities were not asked for."""
        return self.logprobs

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if len(self.prompt) > limits.max_prompts:
            raise bad_request(
                f"Invalid 'prompt': at most {limits.max_prompts} prompts are allowed.", "prompt"
            )
        if len(self.prompt) * self.choices > limits.max_sequences:
            raise bad_request(f"Invalid 'n': prompts times n must be at most {limits.max_sequences}.", "n")
        if self.best_of is not None and self.best_of < self.choices:
            raise bad_request("Invalid 'best_of': must be at least 'n'.", "best_of")
        if self.best_of is not None and self.best_of > self.choices:
            raise bad_request(
                "The parameter 'best_of' is not supported by this server yet, unless it equals 'n'.",
                "best_of",
                "unsupported_parameter",
            )
