"""Annotations of JSON schemas: titles, descriptions and other keywords that neither allow nor forbid a value.

Imports no other package, so that services which only pass a schema on can drop its annotations."""

from __future__ import annotations

from typing import Any

ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "enumDescriptions",
        "enumNames",
        "errorMessage",
        "example",
        "examples",
        "externalDocs",
        "markdownDescription",
        "propertyOrdering",
        "readOnly",
        "strict",
        "title",
        "writeOnly",
        "xml",
    }
)
"""Keywords that allow and forbid nothing, by the specification or by the tools that write them."""

_EXTENSION = "x-"
GUIDANCE = "x-guidance"
"""llguidance's options: the one name with the prefix of vendors' annotations that is none."""

SCHEMA_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SCHEMAS = ("additionalProperties", "items", "additionalItems", "propertyNames")
"""Keywords whose values are objects of schemas, arrays of schemas, and schemas (`items`: or an array)."""


def is_note(keyword: str) -> bool:
    """Whether a keyword is an annotation, by its name."""
    return keyword in ANNOTATIONS or (keyword.startswith(_EXTENSION) and keyword != GUIDANCE)


# No deeper schema is honoured.
_MOST_LEVELS = 64


def without_notes(schema: Any, *, levels: int = _MOST_LEVELS) -> Any:
    """The schema without annotations, which a server need not compile again for other words of theirs.

    What is no schema, or stands deeper than so many levels, is left as it is.
    """
    if not isinstance(schema, dict) or not levels:
        return schema
    return {name: _inner(name, value, levels - 1) for name, value in schema.items() if not is_note(name)}


def _inner(name: str, value: Any, levels: int) -> Any:
    if name in SCHEMA_OBJECTS and isinstance(value, dict):
        return {key: without_notes(item, levels=levels) for key, item in value.items()}
    if name in SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
        return [without_notes(item, levels=levels) for item in value] if isinstance(value, list) else value
    return without_notes(value, levels=levels) if name in SCHEMAS else value
