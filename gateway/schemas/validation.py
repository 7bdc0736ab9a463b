"""From a JSON object to a request model, or to an error that names the field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import Tag, ValidationError
from pydantic_core import ErrorDetails

from catenary.nearest import nearest
from gateway.errors import ApiError, bad_request
from gateway.ignored import MAX_NAMES, current_ignored, field_path
from gateway.schemas.base import MAX_FIELDS, FieldError, RequestLimits, RequestModel
from gateway.schemas.ignored import drop_neutral, without_ignored
from gateway.schemas.response_items import UNION_TAGS

T = TypeVar("T", bound=RequestModel)
Location = tuple[int | str, ...]
"""Where in a body an error is, as pydantic says it: names of fields, indices and tags of unions."""

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
    """The request. Unknown fields are refused or, with the option unknown_fields=ignore, noted as ignored."""
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
    """The paths of what a request has beyond the fields of its models, in their order."""
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
    """The unknown field that was probably meant for the missing one which is the first problem, as `message`
    is for `messages`; None if there is no such field."""
    missing = problems[0]["loc"]
    if problems[0]["type"] != "missing":
        return None
    unknown = (each for each in problems if each["type"] == "extra_forbidden")
    beside = (each for each in unknown if each["loc"][:-1] == missing[:-1])
    return next((each for each in beside if _meant(model, each["loc"]) == missing[-1]), None)


def _meant(model: type[RequestModel], location: Location) -> str | None:
    """The known field that an unknown one at `location` was probably meant to be: one that is called so by
    another route or server, or the nearest by its letters."""
    *way, name = location
    if not isinstance(name, str):
        return None
    found = _models_at(model, way)
    for each in found:
        if (other := each.other_names.get(name)) is not None:
            return other
    return nearest(name, {known for each in found for known in each.known_names()})


def _models_at(model: type[RequestModel], way: Sequence[int | str]) -> list[type[RequestModel]]:
    """The models of what is at the end of `way` in a request: several for a union without tags."""
    found = [model]
    tag = ""
    for place, part in enumerate(way):
        if isinstance(part, str) and not _is_tag(way, place):
            tag = str(way[place + 2]) if place + 2 < len(way) and _is_tag(way, place + 2) else ""
            fields = [each.field_named(part) for each in found]
            found = [each for field in fields if field for each in _models_in(field.annotation, tag)]
    return found


def _models_in(annotation: Any, tag: str) -> Iterator[type[RequestModel]]:
    """The models that a field's type is made of; of a tagged union, those with `tag`."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation
        return
    tags = [each.tag for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Tag)]
    if not tags or tag in tags:
        for part in get_args(annotation):
            yield from _models_in(part, tag)


def _is_tag(location: Sequence[int | str], place: int) -> bool:
    """Whether a part of an error's location names a variant of a union, and no field."""
    return location[place] in UNION_TAGS and place > 0 and isinstance(location[place - 1], int)


def _param(location: Location) -> str:
    """The path of the field that an error is about."""
    fields = [str(part) for place, part in enumerate(location) if not _is_tag(location, place)]
    return field_path(fields, _MAX_DEPTH)
