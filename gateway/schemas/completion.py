"""`POST /v1/completions`, and `POST /tokenize` and `/detokenize` of texts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.schemas.base import (
    INT32_MAX,
    MODEL,
    PROMPTS_SCHEMA,
    FieldError,
    RequestLimits,
    RequestModel,
    limits_of,
    read_prompts,
)
from gateway.schemas.generation import GenerationFields
from gateway.schemas.ignored import (
    COMPLETION,
    COMPLETION_FIELDS,
    EVERYWHERE,
    OTHERS_COUNTERPARTS,
    TOKENIZE,
    tree_of,
)

# OpenAI's own.
DEFAULT_MAX_TOKENS = 16


def _read_prompt(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
    return read_prompts(value, limits_of(info).max_prompts, "prompts")


def _none_for_false(value: Any) -> Any:
    """Replace false, with which chats switch log probabilities off."""
    return None if value is False else value


class CompletionRequest(GenerationFields):
    """A text to go on with."""

    unsupported = COMPLETION
    ignored = tree_of(COMPLETION_FIELDS)
    other_names = {
        **OTHERS_COUNTERPARTS,
        "n_probs": "logprobs",
        "input": "prompt",
        "messages": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    }

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_read_prompt), PROMPTS_SCHEMA] = Field(
        description="Prompts, as text or as token ids. Text that spells a control token is that token.",
    )
    logprobs: Annotated[int | None, BeforeValidator(_none_for_false)] = Field(
        None, ge=0, le=5, description="Report the log probability of each token and of so many alternatives."
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT32_MAX,
        description="Most tokens to generate; 0 only with echo or prompt_logprobs.",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around a text, as its BOS. Default: true."
    )
    echo: bool | None = Field(None, description="Repeat the prompt in front of each choice.")

    @property
    def top_count(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if len(self.prompt) * self.samples > limits.max_sequences:
            raise bad_request(
                f"Invalid 'n': prompts times n (or best_of) must be at most {limits.max_sequences}.", "n"
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise bad_request(
                "Invalid 'max_tokens': must be at least 1, or 0 with 'echo' or 'prompt_logprobs'.",
                "max_tokens",
            )


class TokenizeRequest(RequestModel):
    """A text to tokenize. Text that spells a control token is that token."""

    unsupported = TOKENIZE
    ignored = tree_of(EVERYWHERE)

    model: str = MODEL
    prompt: str = Field(description="The text; it may be empty.")
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around a text, as its BOS. Default: true."
    )
    return_token_strs: bool | None = Field(None, description="Give the tokens' spellings too.")


def _read_ids(value: Any, info: ValidationInfo) -> list[int]:
    """Read ids; quick for hundreds of thousands."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise FieldError("Invalid type for '{param}': expected an array of integers.", "invalid_type")
    most = limits_of(info).max_detokenize_ids
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} items are allowed.")
    if value and (min(value) < 0 or max(value) > INT32_MAX):
        raise FieldError("Invalid '{param}': an id is out of vocabulary.")
    return value


class DetokenizeRequest(RequestModel):
    """Token ids to text."""

    ignored = tree_of(EVERYWHERE)

    model: str = MODEL
    tokens: Annotated[
        list[int],
        PlainValidator(_read_ids),
        WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
    ] = Field(description="Token ids; there may be none.")
