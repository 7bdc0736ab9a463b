"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.schemas.base import GenerationFields, limits_of
from gateway.schemas.limits import RequestLimits
from gateway.schemas.prompts import PROMPTS_SCHEMA, read_prompts
from gateway.schemas.structured import StructuredFields

DEFAULT_MAX_TOKENS = 16


def _read_prompt(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
    return read_prompts(value, limits_of(info).max_prompts, "prompts")


class CompletionRequest(GenerationFields, StructuredFields):
    """A text to go on with."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_read_prompt), PROMPTS_SCHEMA] = Field(
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
        StructuredFields.check(self, limits)
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
