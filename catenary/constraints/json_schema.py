"""A JSON schema before it is compiled: its size, its keywords and their values."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from catenary.constraints.keywords import (
    COUNTS,
    FORMATS,
    MAX_DIVISOR,
    NEUTRAL,
    VALUES,
)
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.references import check_references, close_objects
from catenary.constraints.regex import read_regex
from catenary.json_bounds import json_levels
from catenary.schema_notes import GUIDANCE, SCHEMA_LISTS, SCHEMA_OBJECTS, SCHEMAS, is_note

_LENGTHS = frozenset({"minLength", "maxLength"})


def limit_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with `propertyNames` replaced by `patternProperties` or `properties`.

    Raises:
        ConstraintError: there is no such schema.
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
    """Return the rules of a name beyond its being a string, which all are."""
    if names is False:
        return {"enum": []}
    if names is True:
        return {}
    kinds = names.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return {"enum": []}
    return {name: value for name, value in names.items() if name != "type"}


def _listed(names: dict[str, Any]) -> list[str] | None:
    """Return the names that are allowed, if they are listed."""
    if names.keys() == {"const"}:
        names = {"enum": [names["const"]]}
    return [name for name in names["enum"] if isinstance(name, str)] if names.keys() == {"enum"} else None


def _pattern(names: dict[str, Any]) -> str | None:
    """Return a pattern of the names that are allowed."""
    if names.keys() == {"pattern"}:
        pattern: str = names["pattern"]
        return pattern
    if names.keys() <= _LENGTHS:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


_SHOWN = re.compile(r"[A-Za-z0-9_$.-]{1,64}")

# A text that begins with a day does not begin with the 29th of February of a common year, to which
# llguidance, that knows how long each month is, gives 29 days in any year.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_DAYS = ("date", "date-time")
# The only point of a time is that of its seconds; behind the fraction comes the zone.
_TIMES = ("time", "date-time")
_FRACTION = r"^[^.]*(\.[0-9]{1,%d}([^0-9.][^.]*)?)?$"
_DURATION = r"^[^0-9]*([0-9]{1,%d}[^0-9]+)*$"


def read_schema(source: str, limits: ConstraintLimits) -> dict[str, Any]:
    """Return the schema for llguidance, of JSON text.

    Raises:
        ConstraintError: it is no JSON, or `clean_schema` refuses it.
    """
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ConstraintError("The JSON schema is not valid JSON.") from None
    return clean_schema(schema, limits)


def clean_schema(schema: Any, limits: ConstraintLimits) -> dict[str, Any]:
    """Return the schema without annotations, white space bounded; every keyword in it is honoured.

    Raises:
        ConstraintError: naming the keyword that is malformed, too large or not supported.
    """
    _check_size(schema, limits)
    if not isinstance(schema, dict | bool):
        raise ConstraintError("A JSON schema must be an object.")
    cleaned = _Cleaner(limits).schema(schema, is_root=True)
    if cleaned is False:
        raise ConstraintError("The JSON schema is false, which allows no value.")
    root: dict[str, Any] = {} if cleaned is True else cleaned
    check_references(root, limits)
    if limits.closed_objects:
        close_objects(root, limits)
        # It may have more parts now.
        check_references(root, limits)
    return root | {GUIDANCE: {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{limits.max_whitespace}}}"}}


def _check_size(schema: Any, limits: ConstraintLimits) -> None:
    nodes = 0
    for depth, level in enumerate(json_levels(schema), start=1):
        nodes += len(level)
        if depth > limits.max_depth:
            raise ConstraintError(f"The JSON schema is nested deeper than {limits.max_depth} levels.")
        if nodes > limits.max_nodes:
            raise ConstraintError(f"The JSON schema has more than {limits.max_nodes} values.")


class _Cleaner:
    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._divisors: set[int] = set()

    def schema(self, value: Any, *, is_root: bool = False) -> Any:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise ConstraintError(
                "Every part of a JSON schema that must be a schema is an object or a boolean."
            )
        found = {name: _whole(item) if name in COUNTS else item for name, item in value.items()}
        if "string" not in _types(found):
            found.pop("format", None)
        found = {
            name: self._keyword(name, item)
            for name, item in found.items()
            if self._counts(name, item, is_root)
        }
        _read_nullable(found)
        _read_format(found, self._limits.max_digits)
        return limit_names(found)

    def _counts(self, name: str, value: Any, is_root: bool) -> bool:
        """Whether the keyword must be honoured; it is then one that can be."""
        if name in VALUES:
            is_valid, words = VALUES[name]
            if not is_valid(value):
                raise ConstraintError(f"The JSON schema's '{name}' must be {words}.")
            return True
        if name in NEUTRAL and value is NEUTRAL[name]:
            return False
        # In an inner schema $id would change what a $ref means.
        if is_note(name) or (name == "$id" and is_root):
            return False
        shown = f"'{name}'" if _SHOWN.fullmatch(name) else "a keyword"
        raise ConstraintError(f"The JSON schema uses {shown}, which is not supported.")

    def _keyword(self, name: str, value: Any) -> Any:
        if name in SCHEMA_OBJECTS:
            if len(value) > self._limits.max_properties:
                raise self._too_many(name, self._limits.max_properties)
            if name == "patternProperties":
                if len(value) > self._limits.max_patterns:
                    raise self._too_many(name, self._limits.max_patterns)
                return {self._pattern(name, key): self.schema(item) for key, item in value.items()}
            return {key: self.schema(item) for key, item in value.items()}
        if name in SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            if len(value) > self._limits.max_alternatives:
                raise self._too_many(name, self._limits.max_alternatives)
            return [self.schema(item) for item in value]
        if name in SCHEMAS:
            return self.schema(value)
        if name in ("enum", "required") and len(value) > self._limits.max_alternatives:
            raise self._too_many(name, self._limits.max_alternatives)
        if name == "multipleOf":
            self._add_divisor(value)
        return self._pattern(name, value) if name == "pattern" else value

    def _pattern(self, name: str, pattern: str) -> str:
        try:
            return read_regex(pattern, self._limits) if pattern else pattern
        except ConstraintError as error:
            raise ConstraintError(f"The JSON schema's '{name}' cannot be honoured: {error}") from None

    def _add_divisor(self, value: float) -> None:
        # Several may meet in one number, whose automaton then has a state for each pair of remainders.
        mantissa = str(value).partition("e")[0].replace(".", "").strip("0")
        self._divisors.add(int(mantissa))
        states = 1
        for divisor in self._divisors:
            states *= divisor
        if states > MAX_DIVISOR:
            raise ConstraintError(
                "The JSON schema's 'multipleOf' values are too large: multiplied, their digits exceed "
                f"{MAX_DIVISOR}."
            )

    @staticmethod
    def _too_many(name: str, limit: int) -> ConstraintError:
        return ConstraintError(f"The JSON schema's '{name}' has more than {limit} entries.")


def _whole(value: Any) -> Any:
    """Return a float without fraction as an integer: the specification counts 2.0 as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_nullable(schema: dict[str, Any]) -> None:
    """Read OpenAPI 3.0's `nullable`: with a type it allows null as well; an `enum` must list null anyway."""
    kinds = schema.get("type")
    if schema.pop("nullable", False) and kinds is not None:
        named = kinds if isinstance(kinds, list) else [kinds]
        schema["type"] = named if "null" in named else [*named, "null"]


def _types(schema: dict[str, Any]) -> tuple[Any, ...]:
    """Return the names in `type`, which may be malformed; of strings alone if there is none."""
    kinds = schema.get("type", "string")
    return tuple(kinds) if isinstance(kinds, list) else (kinds,)


def _read_format(schema: dict[str, Any], digits: int) -> None:
    """Drop a format that is not of the specification, have days be those of the calendar, and give numbers an
    end: a model may write digits for ever where a format allows any number of them."""
    name = schema.get("format")
    if name is None:
        return
    if name not in FORMATS:
        del schema["format"]
    patterns = [_DAY] if name in _DAYS else []
    if name in _TIMES:
        patterns.append(_FRACTION % digits)
    elif name == "duration":
        patterns.append(_DURATION % digits)
    for pattern in patterns:
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern
