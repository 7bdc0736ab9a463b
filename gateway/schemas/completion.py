"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.schemas.base import FieldError, GenerationFields, limits_of
from gateway.schemas.limits import RequestLimits

DEFAULT_MAX_TOKENS = 16
_PROMPT_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def _read_prompt(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
    """Every form of `prompt` as a list of prompts of one kind; quick for millions of ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    most = limits_of(info).max_prompts
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} prompts are allowed.")
    if kinds == {list} and any(set(map(type, ids)) - {int} for ids in value):
        kinds = set()
    if kinds not in ({str}, {list}) and value:
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    if not value or not all(value):
        raise FieldError("Invalid '{param}': prompts must not be empty.")
    return list(value)


class CompletionRequest(GenerationFields):
    """A text to go on with."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_read_prompt), _PROMPT_SCHEMA] = Field(
        description="Prompts, as text or as token ids. Text that spells a control token is that token.",
    )
    logprobs: int | None = Field(
        None, ge=0, le=5, description="Report the log probability of each token and of so many alternatives."
    )
    best_of: int | None = Field(None, ge=1, le=20, description="Only the value of n is supported.")

    @property
    def top_count(self) -> int | None:
        return self.logprobs

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
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
