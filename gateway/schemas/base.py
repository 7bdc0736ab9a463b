"""The common base of all request models: limits, free-form JSON, texts that may come as token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo

from catenary.json_bounds import Excess, json_excess
from catenary.sequence_limits import (
    ALLOWED_TOKEN_IDS,
    BAD_WORD_LENGTH,
    BAD_WORDS,
    CHOICES,
    LOGIT_BIAS,
    MAX_CONSTRAINT_BYTES,
    SCORED_PROMPT_TOKENS,
    STOP_LENGTH,
    STOP_TOKEN_IDS,
)
from gateway.errors import ApiError, bad_request
from gateway.ignored import current_ignored
from gateway.schemas.ignored import Tree

# Of the wire's integers, and fields of one object: more than any object of the API has, before one is read.
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_FIELDS = 256
MODEL: Any = Field("", description="Name of a served model. Default: the only one.")
"""The model of a request. Before a request is read, the one that it leaves out is filled in."""
DEPRECATED: JsonDict = {"deprecated": True}
"""For the schema of a field that has a newer name. pydantic's own mark warns at each read of the field."""


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
    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Parameters that `parse_request` refuses by name, each with the values that ask for nothing."""

    ignored: ClassVar[Tree] = {}
    """Fields that `parse_request` takes, and that have no effect."""
    opaque: ClassVar[bool] = False
    """Whether unknown fields are dropped without being noted as ignored: the whole object has no effect."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other routes or servers have for a field of this model, with the field. They are unknown or
    not supported here, and the error says which field is meant."""

    @classmethod
    def known_names(cls) -> set[str]:
        """The names of the fields that a request may have."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def field_named(cls, name: str) -> FieldInfo | None:
        """The field that a request has under this name."""
        fields = cls.model_fields.items()
        return next((field for own, field in fields if (field.alias or own) == name), None)

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


def only_known(value: Mapping[str, Any], known: Collection[str], *path: int | str) -> bool:
    """Whether an object that no model reads has these fields alone. Where unknown fields are to be ignored,
    others are noted, below `path`, and do not count."""
    unknown = [name for name in value if name not in known]
    ignored = current_ignored()
    if not ignored.lenient:
        return not unknown
    for name in unknown:
        ignored.note(*path, name)
    return True


def plain_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object of moderate size. Raises FieldError."""
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected an object.", "invalid_type")
    if len(value) > MAX_FIELDS:
        raise FieldError(f"Invalid '{{param}}': at most {MAX_FIELDS} fields are allowed.")
    return value


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request: counts, lengths in characters for stop strings and bad words, priorities.

    The fields are options of the gateway with these defaults.
    """

    max_n: int = CHOICES.gateway
    max_prompts: int = 128
    max_sequences: int = 256
    max_messages: int = 4096
    max_content_parts: int = 16384
    max_tools: int = 128
    max_tools_bytes: int = 1 << 20
    max_tool_calls: int = 4096
    max_documents: int = 1024
    max_json_depth: int = 64
    max_json_values: int = 200_000
    max_detokenize_ids: int = 262_144
    max_stop_length: int = STOP_LENGTH.gateway
    max_stop_token_ids: int = STOP_TOKEN_IDS.gateway
    max_embedding_inputs: int = 2048
    max_pairs: int = 1024
    max_constraint_bytes: int = MAX_CONSTRAINT_BYTES
    max_constraint_depth: int = 64
    max_constraint_values: int = 20_000
    max_constraint_choices: int = 1000
    max_logit_bias: int = LOGIT_BIAS.gateway
    max_allowed_token_ids: int = ALLOWED_TOKEN_IDS.gateway
    max_bad_words: int = BAD_WORDS.gateway
    max_bad_word_length: int = BAD_WORD_LENGTH.gateway
    max_scored_prompt_tokens: int = SCORED_PROMPT_TOKENS.gateway
    min_priority: int = -100
    max_priority: int = 100

    @property
    def most_items(self) -> int:
        """Items of a valid request's arrays of messages, their parts and calls, and tools, together."""
        return self.max_messages + self.max_content_parts + self.max_tool_calls + 2 * self.max_tools


def check_data(value: Any, max_depth: int, max_values: int) -> None:
    """Refuse arrays and objects inside of one another deeper than `max_depth`, or with more than `max_values`
    values in all. Raises FieldError.
    """
    excess = json_excess(value, max_depth, max_values)
    if excess is Excess.DEPTH:
        raise FieldError(f"Invalid '{{param}}': nested deeper than {max_depth} levels.")
    if excess is Excess.VALUES:
        raise FieldError(f"Invalid '{{param}}': at most {max_values} values are allowed.")


def _bounded(value: Any, info: ValidationInfo) -> Any:
    limits = limits_of(info)
    check_data(value, limits.max_json_depth, limits.max_json_values)
    return value


BOUNDED = BeforeValidator(_bounded)
"""The operator's limits on depth and number of values, as an annotation of a field."""


PROMPTS_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def read_prompts(value: Any, most: int, what: str) -> list[str] | list[list[int]]:
    """Every form as a list of at most `most` texts or id lists, called `what`; quick for millions of ids.

    Raises FieldError.
    """
    given = value
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    listed = not isinstance(given, str)
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} {what} are allowed.")
    if kinds == {list} and any(set(map(type, ids)) - {int} for ids in value):
        kinds = set()
    if kinds not in ({str}, {list}) and value:
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    if not value or not all(value):
        empty = next((str(place) for place, item in enumerate(value) if not item), "")
        raise FieldError(f"Invalid '{{param}}': {what} must not be empty.", at=empty if listed else "")
    return list(value)
