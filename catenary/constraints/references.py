"""Where the references of a schema lead: nowhere, too deep, or in a circle that has no end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from catenary.constraints.keywords import SCHEMA_LISTS, SCHEMA_OBJECTS, SCHEMAS
from catenary.constraints.kinds import ConstraintError, ConstraintLimits

_DEFINITIONS = ("$defs", "definitions")
_SCALARS = frozenset({"null", "boolean", "number", "string", "integer"})


def check_references(root: dict[str, Any], limits: ConstraintLimits) -> None:
    """Check a schema of honoured keywords.

    Raises:
        ConstraintError: a $ref leads out of the schema or to no schema, the way through them is too long, or
            the schema asks for itself without an end, so that no finite value satisfies it.
    """
    schemas = _all_schemas(root)
    targets = {id(schema): find_target(root, schema["$ref"]) for schema in schemas if "$ref" in schema}
    known = {id(schema) for schema in schemas}
    for target in targets.values():
        if isinstance(target, dict) and id(target) not in known:
            raise ConstraintError("The JSON schema's '$ref' leads to what is no schema.")
    _check_depth(schemas, targets, limits)
    if not _has_values(root, schemas, targets):
        raise ConstraintError("The JSON schema refers to itself by '$ref' in a circle that no value ends.")


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right below, each with the keyword that holds it; booleans are left out."""
    for name in (*SCHEMA_OBJECTS, *SCHEMA_LISTS, *SCHEMAS):
        value = schema.get(name, ())
        if name in SCHEMA_OBJECTS:
            value = list(value.values()) if value else ()
        for child in value if isinstance(value, list | tuple) else (value,):
            if isinstance(child, dict):
                yield name, child


def _all_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Each schema before those in it."""
    found, stack = [], [root]
    while stack:
        schema = stack.pop()
        found.append(schema)
        stack += [child for _, child in _children(schema)]
    return found


def find_target(root: dict[str, Any], reference: str) -> Any:
    """What a reference leads to: a schema or a boolean. Raises ConstraintError if it leads to neither."""
    if reference != "#" and not reference.startswith("#/"):
        raise ConstraintError("The JSON schema's '$ref' must be '#' or begin with '#/'.")
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            raise ConstraintError("The JSON schema's '$ref' leads to nothing.")
    if not isinstance(found, dict | bool):
        raise ConstraintError("The JSON schema's '$ref' leads to what is no schema.")
    return found


def _check_depth(schemas: list[dict[str, Any]], targets: dict[int, Any], limits: ConstraintLimits) -> None:
    """A compiler that follows references sees each schema once: no way is longer than all parts together."""
    heights: dict[int, int] = {}
    for schema in reversed(schemas):
        inner = (heights[id(child)] for name, child in _children(schema) if name not in _DEFINITIONS)
        heights[id(schema)] = 1 + max(inner, default=0)
    parts = {id(schemas[0]), *(id(target) for target in targets.values() if isinstance(target, dict))}
    depth = sum(heights[part] for part in parts)
    if depth > limits.max_reference_depth:
        raise ConstraintError(
            f"The JSON schema's parts that '$ref' names are {depth} levels deep together; at most "
            f"{limits.max_reference_depth} are allowed."
        )


def _has_values(root: dict[str, Any], schemas: list[dict[str, Any]], targets: dict[int, Any]) -> bool:
    """Whether a finite value can satisfy the schema, as far as references decide it: the least fixpoint,
    found by looking again only at what needs a schema that was found to have one."""
    needed_by: dict[int, list[dict[str, Any]]] = {}
    for schema in schemas:
        for _, child in _children(schema):
            needed_by.setdefault(id(child), []).append(schema)
        if id(schema) in targets:
            needed_by.setdefault(id(targets[id(schema)]), []).append(schema)
    finite: set[int] = set()
    # Those within others come last.
    waiting = list(schemas)
    while waiting:
        schema = waiting.pop()
        if id(schema) not in finite and _is_finite(schema, targets, finite):
            finite.add(id(schema))
            waiting += needed_by.get(id(schema), ())
    return id(root) in finite


def _is_finite(schema: dict[str, Any], targets: dict[int, Any], finite: set[int]) -> bool:
    def ends(child: Any) -> bool:
        return child is not False and (child is True or id(child) in finite)

    return (
        ("$ref" not in schema or ends(targets[id(schema)]))
        and all(ends(child) for child in schema.get("allOf", ()))
        and all(any(ends(child) for child in schema[name]) for name in ("anyOf", "oneOf") if name in schema)
        and (_allows_scalar(schema) or _is_finite_object(schema, ends) or _is_finite_array(schema, ends))
    )


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", ())
    return frozenset((named,) if isinstance(named, str) else named)


def _allows_scalar(schema: dict[str, Any]) -> bool:
    types = _types(schema)
    return not types or bool(types & _SCALARS) or "enum" in schema or "const" in schema


def _is_finite_object(schema: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    properties = schema.get("properties", {})
    return "object" in _types(schema) and all(
        ends(properties[name]) for name in schema.get("required", ()) if name in properties
    )


def _is_finite_array(schema: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    items, first = schema.get("items", True), list(schema.get("prefixItems", ()))
    if isinstance(items, list):
        items, first = schema.get("additionalItems", True), items
    count = schema.get("minItems", 0)
    return (
        "array" in _types(schema)
        and all(ends(item) for item in first[:count])
        and (count <= len(first) or ends(items))
    )
