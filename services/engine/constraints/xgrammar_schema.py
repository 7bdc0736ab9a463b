"""Which JSON schemas xgrammar honours in full. It passes over what it does not know."""

from __future__ import annotations

from typing import Any, Final

from services.engine.constraints.matching import ConstraintRefused

# What says nothing about a value.
_NOTES: Final = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
)
# Of these one alone decides.
_CHOICES: Final = frozenset({"enum", "const", "$ref", "anyOf"})
_BY_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def honoured(schema: Any) -> Any:
    """The schema as xgrammar honours it. Raises ConstraintRefused for what it might pass over.

    Its depth was checked before.
    """
    if isinstance(schema, bool):
        return schema
    found = {key: value for key, value in schema.items() if not key.startswith("x-")}
    keys = found.keys() - _NOTES
    choices = keys & _CHOICES
    if choices:
        _check_choice(found, keys, choices)
    else:
        _check_typed(found, keys)
        _write_lengths(found)
    for name in ("$defs", "definitions", "properties"):
        if name in found:
            found[name] = {key: honoured(part) for key, part in found[name].items()}
    for name in ("anyOf", "prefixItems"):
        if name in found:
            found[name] = [honoured(part) for part in found[name]]
    for name in ("additionalProperties", "items"):
        if name in found:
            found[name] = honoured(found[name])
    return found


def _check_choice(schema: dict[str, Any], keys: set[str], choices: set[str]) -> None:
    allowed = {"type"} if choices <= {"enum", "const"} else set()
    _refuse(sorted(keys - choices - allowed) or sorted(choices)[1:])
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if kind is not None and not all(_is_of(value, kind) for value in values):
        raise ConstraintRefused("The JSON schema's 'enum' has values that its 'type' does not allow.")


def _check_typed(schema: dict[str, Any], keys: set[str]) -> None:
    given = schema.get("type")
    kinds = list(_BY_TYPE) if given is None else given if isinstance(given, list) else [given]
    known = {"type"}.union(*(_BY_TYPE.get(kind, frozenset()) for kind in kinds))
    _refuse(sorted(keys - known))
    if given is None and keys:
        raise ConstraintRefused("xgrammar honours a JSON schema's keywords only beside a 'type'.")
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        raise ConstraintRefused("xgrammar does not honour 'pattern' beside 'minLength' or 'maxLength'.")
    missing = set(schema.get("required", ())) - schema.get("properties", {}).keys()
    if missing:
        raise ConstraintRefused("The JSON schema's 'required' names what is not among its 'properties'.")


def _write_lengths(schema: dict[str, Any]) -> None:
    """Strings of some length as a pattern: xgrammar would let control characters in, which is no JSON."""
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.pop("minLength", 0), schema.pop("maxLength", "")
        schema["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'


def _is_of(value: Any, kind: str | list[str]) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return any(
        isinstance(value, _TYPES.get(one, ())) and (one == "boolean" or not isinstance(value, bool))
        for one in kinds
    )


def _refuse(keywords: list[str]) -> None:
    if keywords:
        raise ConstraintRefused(f"The JSON schema uses '{keywords[0][:64]}', which xgrammar does not honour.")
