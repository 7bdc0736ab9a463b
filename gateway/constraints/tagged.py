"""A function's parameters for formats that write each with tags of its own, and not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway.parsing.schema_types import parameter_types, to_json
from gateway.parsing.tags import TaggedFormat, value_begin

# Of the whole schema; whatever else it says, values alone do not show.
_ROOT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "example", "deprecated"})
_DEFINITIONS = ("$defs", "definitions")
_KEY = re.compile(r"[\w.-]{1,64}")


def tagged_parameters(schema: Mapping[str, Any], form: TaggedFormat) -> list[dict[str, Any]] | None:
    """The parameters as a structural tag has them, in the order of the schema's `properties`.

    What is written by it, and read with the types of the schema, satisfies the schema. None: there is
    something in the schema that texts cannot be held to."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if schema.keys() - _ROOT - _SAYS_NOTHING or schema.get("type", "object") != "object":
        return None
    if not properties.keys() >= {name for name in required if isinstance(name, str)}:
        return None
    made = []
    for name, part in properties.items():
        value = _value(name, part, schema, form) if _KEY.fullmatch(name) else None
        if value is None:
            return None
        tags = {"begin": value_begin(form, name), "end": form.value_end}
        made.append({**tags, **value, "optional": name not in required})
    return made


def _value(name: str, part: Any, root: Mapping[str, Any], form: TaggedFormat) -> dict[str, Any] | None:
    types = parameter_types(root, name)
    if not isinstance(part, dict):
        return {"without": list(form.without)} if part is True else None
    if types and "string" not in types:
        # It is read as the JSON that it is.
        return {"schema": {key: root[key] for key in _DEFINITIONS if key in root} | part}
    if _any_text(part):
        return {"without": list(form.without)}
    values = part["enum"] if "enum" in part else [part["const"]] if "const" in part else None
    if not isinstance(values, list) or part.keys() - _SAYS_NOTHING - {"type", "enum", "const"}:
        return None
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    for text, value in zip(texts, values, strict=True):
        read = json.loads(to_json(text, types))
        same = type(read) is type(value) and read == value
        if not (text and same) or any(mark in text for mark in form.without):
            return None
    return {"texts": texts}


def _any_text(part: Any) -> bool:
    """Whether any text is a value of a schema, as it is one type of several, none of which says more."""
    if not isinstance(part, dict):
        return part is True
    says = part.keys() - _SAYS_NOTHING
    for key in ("anyOf", "oneOf"):
        if says == {key} and isinstance(part[key], list):
            return all(map(_any_text, part[key]))
    return says <= {"type"}
