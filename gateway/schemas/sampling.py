"""How the next token is chosen: the parameters of all generating routes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from catenary.parameters import BIAS, LENGTH_PENALTY, MIN_P, PENALTY, REPETITION, TOP_P
from gateway.errors import bad_request
from gateway.schemas.base import INT32_MAX, INT64_MAX, FieldError, RequestModel, limits_of, within
from gateway.schemas.limits import RequestLimits

# As JSON writes numbers: one id has one name.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_BIAS_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
)


def _read_bias(value: Any, info: ValidationInfo) -> dict[int, float] | None:
    """Biases by token id. JSON has only texts for keys."""
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


class SamplingFields(RequestModel):
    """Temperature, filters, penalties, bias and bans, several samples, beam search."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")
    top_p: float | None = Field(
        None, ge=0, le=TOP_P.high, allow_inf_nan=False, description="Nucleus mass; 0: the best token alone."
    )
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="Keep the k best tokens; 0 and -1: all.")
    min_p: float | None = Field(
        None,
        ge=MIN_P.low,
        le=MIN_P.high,
        allow_inf_nan=False,
        description="Least probability, as a share of the best token's.",
    )
    presence_penalty: float | None = Field(
        None,
        ge=PENALTY.low,
        le=PENALTY.high,
        allow_inf_nan=False,
        description="Taken from the logits of generated tokens.",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=PENALTY.low,
        le=PENALTY.high,
        allow_inf_nan=False,
        description="The same, as often as each was generated.",
    )
    repetition_penalty: float | None = Field(
        None,
        ge=REPETITION.low,
        le=REPETITION.high,
        allow_inf_nan=False,
        description="Divides the logits of tokens of prompt and answer; 1 is off.",
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
        """Choices per prompt."""
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
        """A search draws nothing: what would change a draw asks for something that it cannot give."""
        neutral = {
            "temperature": (0, 1),
            "top_p": (1,),
            "top_k": (0, -1),
            "min_p": (0,),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in (None, *values):
                raise bad_request(f"'{name}' cannot be combined with 'use_beam_search'.", name)

    def _check_no_search(self) -> None:
        for name, given in (
            ("length_penalty", self.length_penalty not in (None, 1)),
            ("early_stopping", bool(self.early_stopping)),
        ):
            if given:
                raise bad_request(f"'{name}' is only allowed with 'use_beam_search'.", name)
