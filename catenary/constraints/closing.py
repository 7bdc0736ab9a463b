"""Objects of a schema that have no properties but those that are listed, unless the schema says otherwise.

By the specification an object that lists properties may have any others. Those who write such schemas rarely
mean it, and a model that is free to invent properties does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from catenary.constraints.keywords import SCHEMA_LISTS, SCHEMA_OBJECTS, SCHEMAS
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.references import find_target

_DEFINITIONS = ("$defs", "definitions")
_MEMBERS = ("allOf", "anyOf", "oneOf")
# What says which other properties there may be.
_SAYS = ("additionalProperties", "patternProperties")


def close_objects(root: dict[str, Any], limits: ConstraintLimits) -> None:
    """Close, in place, the objects of a schema of honoured keywords that `_SAYS` nothing of other properties.

    Where several schemas hold for one value (`allOf`, or `properties` beside `$ref` or `anyOf`), the
    outermost lists what all of them list: closed one by one they would exclude each other's.

    Raises:
        ConstraintError: the schema would become much larger, since many objects share large parts.
    """
    _Closing(root, limits.max_nodes).run()


class _Closing:
    def __init__(self, root: dict[str, Any], most: int) -> None:
        """`most`: schemas and names that the objects list together, shared ones counted for each."""
        self._root = root
        self._most = self._left = most
        schemas = list(_all(root))
        # Those that hold beside others, whose objects are not theirs alone.
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
        """Have a reference to what holds beside others elsewhere lead to a copy, which can be closed."""
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
        """The schemas that hold for the same value."""
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
        """The names that a schema and those beside it list, in the order of their schemas; None: there are
        none, or one says what others may be."""
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
    """Each schema in a schema, itself included."""
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
