"""`propertyNames`, as far as it can be said by other keywords."""

from __future__ import annotations

from typing import Any

from catenary.constraints.kinds import ConstraintError

_LENGTHS = frozenset({"minLength", "maxLength"})


def limit_names(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of honoured keywords with its `propertyNames` said by `patternProperties` or `properties`.

    Raises:
        ConstraintError: it cannot be.
    """
    if "propertyNames" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    names = _says(schema["propertyNames"])
    if not names:
        return rest
    others = schema.get("additionalProperties", True)
    if (listed := _listed(names)) is not None and "patternProperties" not in schema:
        own = schema.get("properties", {})
        allowed = {name: value if name in listed else False for name, value in own.items()}
        properties = allowed | {name: others for name in listed if name not in own}
        return rest | {"properties": properties, "additionalProperties": False}
    if (pattern := _pattern(names)) is None or "properties" in schema or "patternProperties" in schema:
        raise ConstraintError("The JSON schema uses 'propertyNames', which is not supported with this value.")
    return rest | {"patternProperties": {pattern: others}, "additionalProperties": False}


def _says(names: Any) -> dict[str, Any]:
    """What is said of a name beyond its being a string, which all are."""
    if names is False:
        return {"enum": []}
    if names is True:
        return {}
    kinds = names.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return {"enum": []}
    return {name: value for name, value in names.items() if name != "type"}


def _listed(names: dict[str, Any]) -> list[str] | None:
    """The names that there may be, if they are listed."""
    if names.keys() == {"const"}:
        names = {"enum": [names["const"]]}
    return [name for name in names["enum"] if isinstance(name, str)] if names.keys() == {"enum"} else None


def _pattern(names: dict[str, Any]) -> str | None:
    """A pattern of the names that there may be."""
    if names.keys() == {"pattern"}:
        pattern: str = names["pattern"]
        return pattern
    if names.keys() <= _LENGTHS:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
