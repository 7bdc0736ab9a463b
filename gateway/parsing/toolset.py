"""Functions that a request offers, and the types that their schemas give to parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.parsing.json_text import json_value, whole
from gateway.parsing.python_text import python_value

# References in a row that are followed to a parameter's type: a schema may go in circles.
_MAX_REFERENCES = 8
_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that an object's `schema` allows for its property `name`; empty: any."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if found is None:
        found = schema.get("additionalProperties")
    return _types(found, schema, _MAX_REFERENCES)


def _types(part: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(part, dict) or depth == 0:
        return frozenset()
    if isinstance(kind := part.get("type"), str):
        return frozenset({kind}) & _ALL
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & _ALL
    for key in ("enum", "const"):
        if key in part:
            values = part[key] if key == "enum" else [part[key]]
            return frozenset(map(_type_of, values if isinstance(values, list) else ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := part.get(key), list):
            return frozenset().union(*(_types(option, root, depth - 1) for option in options[:64]))
    if isinstance(parts := part.get("allOf"), list):
        return next((found for each in parts[:64] if (found := _types(each, root, depth - 1))), frozenset())
    if isinstance(reference := part.get("$ref"), str):
        return _types(_target(reference, root), root, depth - 1)
    return frozenset({"object"} if "properties" in part else {"array"} if "items" in part else ())


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference inside of the schema; None if it has none."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/")[:16]:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _type_of(value: Any) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "string")


def is_text(types: frozenset[str]) -> bool:
    """Return whether a value can only be a string, so that its text can be emitted before it has ended."""
    return types == {"string"}


def to_json(text: str, types: frozenset[str]) -> str:
    """Return `text` as JSON: of an allowed type if it is written like one, else a string.

    Where the schema does not say, objects and arrays are taken as such and everything else is a string."""
    bare = text.strip()
    found = _literal(bare, types or frozenset({"object", "array", "string"}))
    return json.dumps(text, ensure_ascii=False) if found is None else found


def _literal(bare: str, types: frozenset[str]) -> str | None:
    if (word := _WORDS.get(bare.lower())) is not None:
        kind = "null" if word == "null" else "boolean"
        # Python's and other capital spellings are taken only where they cannot be meant as text.
        spelled = bare == word or "string" not in types
        return word if kind in types and spelled else None
    first = bare[:1]
    if first in ("{", "["):
        if ("object" if first == "{" else "array") not in types:
            return None
        found = whole(json_value, bare)
        return whole(python_value, bare) if found is None else found
    if not types & {"integer", "number"}:
        return None
    number = whole(json_value, bare)
    if number is None or first == '"':
        return None
    if "number" in types or number.lstrip("-").isdigit():
        return number
    mantissa, _, fraction = number.partition(".")
    return mantissa if fraction and not fraction.strip("0") else None


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Schemas of the parameters by function. `allowed`: those that may be called; None: any."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allowed: frozenset[str] | None = None
    single: bool = False
    """Whether at most one call is wanted."""

    def accepts(self, name: str, *, known: bool) -> bool:
        """Return whether a call of `name` is one. A model may invent a name, which the client is to answer,
        unless the call has no marker (`known`): there only a function that exists tells a call from text."""
        if self.allowed is not None:
            return name in self.allowed
        return name in self.schemas if known else NAME.fullmatch(name) is not None

    def knows(self, function: str, parameter: str) -> bool:
        """Return whether the function has a parameter of this name, or its schema does not list them."""
        properties = self.schemas.get(function, {}).get("properties")
        return parameter in properties if isinstance(properties, Mapping) else True

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types of a parameter; empty if unspecified."""
        return parameter_types(self.schemas.get(function, {}), parameter)
