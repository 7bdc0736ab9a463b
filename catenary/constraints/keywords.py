"""Keywords of JSON Schema: which are honoured, with what values, and which say nothing about a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
UNREADABLE_FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
)
"""Formats of the specification that are not honoured. Any other name is an annotation."""

COUNTS = (
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
)
MAX_COUNT = 1_000_000
MAX_NUMBER = 10**18

# Automata of divisibility have a state for each remainder.
MAX_DIVISOR = 1000


def _is_count(value: Any) -> bool:
    return _is_integer(value) and 0 <= value <= MAX_COUNT


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_bound(value: Any) -> bool:
    # A boolean in draft 4.
    return isinstance(value, bool) or _is_number(value)


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(name in TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_any(value: Any) -> bool:
    return True


VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or more of {', '.join(TYPES)}"),
    "enum": (_is_list, "an array that is not empty"),
    "const": (_is_any, "a value"),
    "properties": (_is_object, "an object of schemas"),
    "patternProperties": (_is_object, "an object of schemas"),
    "additionalProperties": (_is_schema, "a schema"),
    "required": (_is_names, "an array of strings"),
    "minProperties": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "maxProperties": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "a schema, or an array of them"),
    "prefixItems": (_is_list, "an array of schemas"),
    "additionalItems": (_is_schema, "a schema"),
    "minItems": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "maxItems": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "minLength": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "maxLength": (_is_count, f"an integer from 0 to {MAX_COUNT}"),
    "pattern": (_is_string, "a string"),
    "format": (
        lambda value: isinstance(value, str) and value not in UNREADABLE_FORMATS,
        f"a string; of the specification's formats it may be {', '.join(FORMATS)}",
    ),
    "nullable": (lambda value: isinstance(value, bool), "true or false"),
    "propertyNames": (_is_schema, "a schema"),
    "minimum": (_is_number, f"a number from -{MAX_NUMBER} to {MAX_NUMBER}"),
    "maximum": (_is_number, f"a number from -{MAX_NUMBER} to {MAX_NUMBER}"),
    "exclusiveMinimum": (_is_bound, f"a number from -{MAX_NUMBER} to {MAX_NUMBER}"),
    "exclusiveMaximum": (_is_bound, f"a number from -{MAX_NUMBER} to {MAX_NUMBER}"),
    "multipleOf": (_is_divisor, f"a number above 0, at most {MAX_NUMBER}"),
    "anyOf": (_is_list, "an array of schemas that is not empty"),
    "oneOf": (_is_list, "an array of schemas that is not empty"),
    "allOf": (_is_list, "an array of schemas that is not empty"),
    "$ref": (_is_string, "a string"),
    "$defs": (_is_object, "an object of schemas"),
    "definitions": (_is_object, "an object of schemas"),
}
"""Keywords that are honoured: what their values must be, as a test and in words."""

NEUTRAL: Mapping[str, bool] = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}
"""Keywords that are not honoured, but ask for nothing with this value."""
