"""Follow the references of a JSON schema: refuse endless and outside ones, and close objects across them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from urllib.parse import unquote

from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.schema_notes import SCHEMA_LISTS, SCHEMA_OBJECTS, SCHEMAS

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
    """Yield the schemas right below, each with the keyword that holds it; booleans are left out."""
    for name in (*SCHEMA_OBJECTS, *SCHEMA_LISTS, *SCHEMAS):
        value = schema.get(name, ())
        if name in SCHEMA_OBJECTS:
            value = list(value.values()) if value else ()
        for child in value if isinstance(value, list | tuple) else (value,):
            if isinstance(child, dict):
                yield name, child


def _all_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all schemas, each before those in it."""
    found, stack = [], [root]
    while stack:
        schema = stack.pop()
        found.append(schema)
        stack += [child for _, child in _children(schema)]
    return found


def find_target(root: dict[str, Any], reference: str) -> Any:
    """Return the target of a reference: a schema or a boolean. Raises ConstraintError if it is neither."""
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
    """Check the depth of the schemas. A compiler that follows references sees each schema once: no way is
    longer than all parts together."""
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


_MEMBERS = ("allOf", "anyOf", "oneOf")
# What says which other properties there may be.
_SAYS = ("additionalProperties", "patternProperties")


def close_objects(root: dict[str, Any], limits: ConstraintLimits) -> None:
    """Close, in place, the objects of a schema of honoured keywords that `_SAYS` nothing of other properties.

    By the specification an object that lists properties may have any others. Authors of schemas rarely mean
    that, and a model that is free to invent properties does so.

    Where several schemas hold for one value (`allOf`, or `properties` next to `$ref` or `anyOf`), the
    outermost lists what all of them list: closed one by one they would exclude each other's.

    Raises:
        ConstraintError: the schema would become much larger, since many objects share large parts.
    """
    _Closing(root, limits.max_nodes).run()


class _Closing:
    def __init__(self, root: dict[str, Any], most: int) -> None:
        """Count at most `most` schemas and names that the objects list together, shared ones for each."""
        self._root = root
        self._most = self._left = most
        schemas = list(_all(root))
        # Schemas that are combined with others: their objects are shared.
        self._joined: set[int] = set()
        waiting = [member for schema in schemas if _joins(schema) for member in self._members(schema)]
        while waiting:
            schema = waiting.pop()
            if id(schema) not in self._joined:
                self._joined.add(id(schema))
                waiting += self._members(schema)
        self._schemas = schemas
        # Of joined schemas, by the identity of these.
        self._copies: dict[int, dict[str, Any]] = {}
        self._names: dict[int, str] = {}

    def run(self) -> None:
        alone = [schema for schema in self._schemas if id(schema) not in self._joined]
        for schema in alone:
            if "$ref" in schema and not _joins(schema):
                self._refer(schema)
        alone += self._copies.values()
        for schema, listed in [(schema, self._listed(schema)) for schema in alone if self._is_own(schema)]:
            if listed is not None:
                own = schema.get("properties", {})
                schema["properties"] = {name: own.get(name, True) for name in listed}
                schema["additionalProperties"] = False

    def _refer(self, schema: dict[str, Any]) -> None:
        """Point a reference to a schema that is combined with others elsewhere to a copy, to close that."""
        target = find_target(self._root, schema["$ref"])
        if not isinstance(target, dict) or id(target) not in self._joined:
            return
        if id(target) not in self._copies:
            copy = {name: value for name, value in target.items() if name not in _DEFINITIONS}
            definitions = self._root.setdefault("$defs", {})
            name = next(f"closed-{i}" for i in count(len(self._copies)) if f"closed-{i}" not in definitions)
            self._copies[id(target)] = definitions[name] = copy
            self._names[id(target)] = f"#/$defs/{name}"
        schema["$ref"] = self._names[id(target)]

    def _members(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the schemas that hold for the same value."""
        for name in _MEMBERS:
            yield from (member for member in schema.get(name, ()) if isinstance(member, dict))
        if "$ref" in schema:
            target = find_target(self._root, schema["$ref"])
            if isinstance(target, dict):
                yield target

    def _is_own(self, schema: dict[str, Any]) -> bool:
        """Whether a schema has to be closed itself: it lists properties, or its members cannot be."""
        joined = any(id(member) in self._joined for member in self._members(schema))
        return joined or "properties" in schema

    def _listed(self, schema: dict[str, Any]) -> list[str] | None:
        """Return the names that a schema and those combined with it list, in the order of their schemas;
        None: there are none, or one allows others."""
        names: dict[str, None] = {}
        lists, seen, waiting = False, set[int](), [schema]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if any(name in one for name in _SAYS):
                return None
            lists = lists or "properties" in one
            listed = (*one.get("properties", ()), *one.get("required", ()))
            self._left -= 1 + len(listed)
            if self._left < 0:
                raise ConstraintError(
                    f"The JSON schema's objects list more than {self._most} properties, those of parts that "
                    "they share counted for each."
                )
            names |= dict.fromkeys(listed)
            waiting += reversed(list(self._members(one)))
        return list(names) if lists else None


def _all(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each schema in a schema, itself included."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        yield schema
        for name in (*SCHEMA_OBJECTS, *SCHEMA_LISTS, *SCHEMAS):
            value = schema.get(name, ())
            if name in SCHEMA_OBJECTS:
                value = list(value.values()) if value else ()
            inner = value if isinstance(value, list | tuple) else (value,)
            waiting += [child for child in inner if isinstance(child, dict)]


def _joins(schema: dict[str, Any]) -> bool:
    """Whether what a schema says of an object and what its members say hold together, and not either of
    them."""
    kinds = [name for name in (*_MEMBERS, "$ref") if name in schema]
    says = any(name in schema for name in ("properties", "required", *_SAYS))
    return len(kinds) > 1 or bool(kinds and says) or len(schema.get("allOf", ())) > 1
