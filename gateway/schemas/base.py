"""Base of all request bodies: limits, checked fields, and parsing with the API's errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag, ValidationError, WithJsonSchema
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ValidationInfo

from catenary.json_bounds import Excess, json_excess
from catenary.nearest import nearest
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
from gateway.schemas.ignored import (
    MAX_NAMES,
    Tree,
    current_ignored,
    drop_neutral,
    field_path,
    without_ignored,
)

# Of the wire's integers, and fields of one object: more than any object of the API has, before one is read.
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_FIELDS = 256
MODEL: Any = Field("", description="Name of a served model. Default: the only one.")
"""Model of a request. Before a request is read, a missing one is filled in."""
DEPRECATED: JsonDict = {"deprecated": True}
"""For the schema of a field that has a newer name. pydantic's own mark warns at each read of the field."""


class FieldError(ValueError):
    """Problem with a field's value, in our own words; `{param}` in the text is the field's name.

    `at`: the field inside of the one that was checked."""

    def __init__(self, text: str, code: str = "invalid_value", at: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.at = at

    def api_error(self, param: str) -> ApiError:
        """Return the 400 for it."""
        param = f"{param}.{self.at}" if self.at else param
        return bad_request(self.text.replace("{param}", param), param, self.code)


class RequestModel(BaseModel):
    """Strict model: no conversion between types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)
    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Parameters that `parse_request` refuses by name, each with its neutral values."""

    ignored: ClassVar[Tree] = {}
    """Fields that `parse_request` takes, and that have no effect."""
    opaque: ClassVar[bool] = False
    """Whether unknown fields are dropped without being noted as ignored: the whole object has no effect."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other routes or servers have for a field of this model, with the field. They are unknown or
    not supported here, and the error says which field is meant."""

    @classmethod
    def known_names(cls) -> set[str]:
        """Return the names of the fields that a request may have."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def field_named(cls, name: str) -> FieldInfo | None:
        """Return the field that a request has under this name."""
        fields = cls.model_fields.items()
        return next((field for own, field in fields if (field.alias or own) == name), None)

    def check(self, limits: RequestLimits) -> None:
        """Check across fields and against the operator's limits. Raises ApiError."""


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
    """Return the limits that a request is validated under. Raises TypeError outside of `parse_request`."""
    if not isinstance(info.context, RequestLimits):
        raise TypeError("requests are validated by parse_request only")
    return info.context


def within(limit: str) -> BeforeValidator:
    """Refuse an array of more items than the operator's limit of that name."""

    def check(value: Any, info: ValidationInfo) -> Any:
        count = getattr(limits_of(info), limit)
        if isinstance(value, list) and len(value) > count:
            raise FieldError(f"Invalid '{{param}}': at most {count} items are allowed.")
        return value

    return BeforeValidator(check)


def only_known(value: Mapping[str, Any], known: Collection[str], *path: int | str) -> bool:
    """Return whether an object that no model reads has these fields alone. Where unknown fields are to be
    ignored, others are noted, below `path`, and do not count."""
    unknown = [name for name in value if name not in known]
    ignored = current_ignored()
    if not ignored.lenient:
        return not unknown
    for name in unknown:
        ignored.note(*path, name)
    return True


def plain_object(value: Any) -> dict[str, Any]:
    """Return `value` if it is an object of moderate size. Raises FieldError."""
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
    """Read every form as a list of at most `most` texts or id lists, called `what`; quick for millions of
    ids.

    Raises FieldError."""
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


T = TypeVar("T", bound=RequestModel)
Location = tuple[int | str, ...]
"""Where in a body an error is, as pydantic says it: names of fields, indices and tags of unions."""

ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
FUNCTION_TAG, OTHER_TAG = "<tool>", "<other tool>"
UNION_TAGS = frozenset({FUNCTION_TAG, OTHER_TAG, *(f"<{kind}>" for kind in ITEM_KINDS)})
"""Parts of an error's location that stand behind the index of an item or a tool, and are no fields."""

# Parts of a field's path that an error names.
_MAX_DEPTH = 6

# pydantic's kinds of error, in our words. Values that the caller sent are never repeated.
_RANGES = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse_request(model: type[T], body: dict[str, Any], limits: RequestLimits) -> T:
    """Validate `body` as `model`. Raises ApiError 400."""
    if len(body) > MAX_FIELDS:
        raise bad_request(f"The request has more than {MAX_FIELDS} parameters.")
    body = without_ignored(body, model.ignored, limits.most_items)
    body = drop_neutral(body, model.unsupported, counterparts=model.other_names)
    try:
        request = _validated(model, body, limits)
    except ValidationError as error:
        raise _first(error, model) from None
    request.check(limits)
    return request


def _validated(model: type[T], body: dict[str, Any], limits: RequestLimits) -> T:
    """Return the request. Unknown fields are refused or, with unknown_fields=ignore, noted as ignored."""
    ignored = current_ignored()
    if not ignored.lenient:
        return model.model_validate(body, context=limits)
    request = model.model_validate(body, context=limits, extra="allow")
    # One more than can be named: the last name stands for all that follow.
    unknown = list(islice(_unknown(request), MAX_NAMES + 1))
    if not unknown:
        return request
    for path in unknown:
        ignored.note(*path)
    return model.model_validate(body, context=limits, extra="ignore")


def _unknown(request: RequestModel) -> Iterator[Location]:
    """Yield the paths of a request's fields that its models lack, in their order."""
    left: list[tuple[Any, Location]] = [(request, ())]
    while left:
        value, path = left.pop()
        if isinstance(value, list):
            found: Iterable[tuple[int | str, Any]] = enumerate(value)
        elif value.opaque:
            continue
        else:
            yield from ((*path, name) for name in value.model_extra or ())
            fields = type(value).model_fields.items()
            found = [(field.alias or name, getattr(value, name)) for name, field in fields]
        inner = [(item, (*path, name)) for name, item in found if isinstance(item, list | RequestModel)]
        left += reversed(inner)


def _first(error: ValidationError, model: type[RequestModel]) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    problem = _misspelt(problems, model) or problems[0]
    param = _param(problem["loc"])
    kind, context = problem["type"], problem.get("ctx", {})
    if isinstance(own := context.get("error"), FieldError):
        return own.api_error(param)
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        meant = _meant(model, problem["loc"])
        hint = f" (did you mean '{meant}'?)" if meant else ""
        return bad_request(f"Unknown parameter: '{param}'{hint}.", param, "unknown_parameter")
    if kind in _RANGES:
        words, key = _RANGES[kind]
        return bad_request(f"Invalid '{param}': must be {words} {context[key]}.", param)
    if kind in _TYPES:
        return bad_request(f"Invalid type for '{param}': expected {_TYPES[kind]}.", param, "invalid_type")
    if kind == "literal_error":
        return bad_request(f"Invalid '{param}': must be one of {context['expected']}.", param)
    if kind == "finite_number":
        return bad_request(f"Invalid '{param}': must be a finite number.", param)
    if kind in ("too_short", "string_too_short"):
        # No minimum is above one.
        return bad_request(f"Invalid '{param}': must not be empty.", param)
    if kind in ("too_long", "string_too_long"):
        unit = "items" if kind == "too_long" else "characters"
        return bad_request(f"Invalid '{param}': must have at most {context['max_length']} {unit}.", param)
    return bad_request(f"Invalid value for '{param}'.", param)


def _misspelt(problems: Sequence[ErrorDetails], model: type[RequestModel]) -> ErrorDetails | None:
    """Return the unknown field that was probably meant for the missing one which is the first problem, as
    `message` is for `messages`; None if there is none."""
    missing = problems[0]["loc"]
    if problems[0]["type"] != "missing":
        return None
    unknown = (each for each in problems if each["type"] == "extra_forbidden")
    beside = (each for each in unknown if each["loc"][:-1] == missing[:-1])
    return next((each for each in beside if _meant(model, each["loc"]) == missing[-1]), None)


def _meant(model: type[RequestModel], location: Location) -> str | None:
    """Return the known field that an unknown one at `location` was probably meant to be: one that another
    route or server calls so, or the nearest by its letters."""
    *way, name = location
    if not isinstance(name, str):
        return None
    found = _models_at(model, way)
    for each in found:
        if (other := each.other_names.get(name)) is not None:
            return other
    return nearest(name, {known for each in found for known in each.known_names()})


def _models_at(model: type[RequestModel], way: Sequence[int | str]) -> list[type[RequestModel]]:
    """Return the models at the end of `way` in a request: several for a union without tags."""
    found = [model]
    tag = ""
    for place, part in enumerate(way):
        if isinstance(part, str) and not _is_tag(way, place):
            tag = str(way[place + 2]) if place + 2 < len(way) and _is_tag(way, place + 2) else ""
            fields = [each.field_named(part) for each in found]
            found = [each for field in fields if field for each in _models_in(field.annotation, tag)]
    return found


def _models_in(annotation: Any, tag: str) -> Iterator[type[RequestModel]]:
    """Yield the models that a field's type is made of; of a tagged union, those with `tag`."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation
        return
    tags = [each.tag for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Tag)]
    if not tags or tag in tags:
        for part in get_args(annotation):
            yield from _models_in(part, tag)


def _is_tag(location: Sequence[int | str], place: int) -> bool:
    """Return whether a part of an error's location names a variant of a union, and no field."""
    return location[place] in UNION_TAGS and place > 0 and isinstance(location[place - 1], int)


def _param(location: Location) -> str:
    """Return the path of the field that an error is about."""
    fields = [str(part) for place, part in enumerate(location) if not _is_tag(location, place)]
    return field_path(fields, _MAX_DEPTH)
