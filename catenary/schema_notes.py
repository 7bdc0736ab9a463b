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


# No deeper schema is honoured, and none of more parts (`ConstraintLimits`).
_MOST_LEVELS = 64
_MOST_PARTS = 20_000


def without_notes(schema: Any, *, levels: int = _MOST_LEVELS, parts: int = _MOST_PARTS) -> Any:
    """Return the schema without annotations, which a server need not compile again for other words of theirs.

    What is no schema, stands deeper than so many levels, or comes after so many parts that are schemas, is
    left as it is: a caller's event loop is held up no longer than that.
    """
    return _Bare(parts).schema(schema, levels)


class _Bare:
    """Leaves out the annotations of one schema."""

    def __init__(self, parts: int) -> None:
        self._left = parts

    def schema(self, value: Any, levels: int) -> Any:
        """Return a part that is a schema, without annotations."""
        if not isinstance(value, dict) or not levels or not self._left:
            return value
        self._left -= 1
        return {
            name: self._inner(name, item, levels - 1) for name, item in value.items() if not is_note(name)
        }

    def _inner(self, name: str, value: Any, levels: int) -> Any:
        if name in SCHEMA_OBJECTS and isinstance(value, dict):
            return {key: self.schema(item, levels) for key, item in value.items()}
        if name in SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            return [self.schema(item, levels) for item in value] if isinstance(value, list) else value
        return self.schema(value, levels) if name in SCHEMAS else value
