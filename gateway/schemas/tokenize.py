"""`POST /tokenize` of a text and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.schemas.base import INT32_MAX, MODEL, FieldError, RequestModel, limits_of
from gateway.schemas.ignored import EVERYWHERE, tree_of
from gateway.schemas.unsupported import TOKENIZE


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
    """Quick for hundreds of thousands."""
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
