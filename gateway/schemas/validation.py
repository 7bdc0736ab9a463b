"""From a JSON object to a request model, or to an error that names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.errors import ApiError, bad_request
from gateway.ignored import current_ignored, field_path
from gateway.schemas.base import MAX_FIELDS, FieldError, RequestModel
from gateway.schemas.ignored import without_ignored
from gateway.schemas.limits import RequestLimits
from gateway.schemas.response_items import UNION_TAGS
from gateway.schemas.unsupported import drop_neutral

T = TypeVar("T", bound=RequestModel)

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
    body = drop_neutral(without_ignored(body, model.ignored), model.unsupported)
    try:
        request = _validated(model, body, limits)
    except ValidationError as error:
        raise _first(error) from None
    request.check(limits)
    return request


def _validated(model: type[T], body: dict[str, Any], limits: RequestLimits) -> T:
    """The request. Unknown fields are refused or, with the option unknown_fields=ignore, noted as ignored."""
    ignored = current_ignored()
    if not ignored.lenient:
        return model.model_validate(body, context=limits)
    request = model.model_validate(body, context=limits, extra="allow")
    unknown = list(_unknown(request, ()))
    if not unknown:
        return request
    for path in unknown:
        ignored.note(*path)
    return model.model_validate(body, context=limits, extra="ignore")


def _unknown(value: Any, path: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """The paths of what a request has beyond the fields of its models."""
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _unknown(item, (*path, place))
    elif isinstance(value, RequestModel) and not value.opaque:
        yield from ((*path, name) for name in value.model_extra or ())
        for name, field in type(value).model_fields.items():
            yield from _unknown(getattr(value, name), (*path, field.alias or name))


def _first(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_input=False)[0]
    param = _param(problem["loc"])
    kind, context = problem["type"], problem.get("ctx", {})
    if isinstance(own := context.get("error"), FieldError):
        return own.api_error(param)
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
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


def _param(location: tuple[int | str, ...]) -> str:
    """The path of the field that an error is about."""
    fields = [
        str(part)
        for index, part in enumerate(location)
        if not (part in UNION_TAGS and index and isinstance(location[index - 1], int))
    ]
    return field_path(fields, _MAX_DEPTH)
