"""A JSON schema before it is compiled: its size, its keywords and their values."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from catenary.constraints.keywords import (
    ANNOTATIONS,
    EXTENSION,
    MAX_DIVISOR,
    NEUTRAL,
    SCHEMA_LISTS,
    SCHEMA_OBJECTS,
    SCHEMAS,
    VALUES,
)
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.references import check_references
from catenary.constraints.regex import check_regex
from catenary.json_bounds import json_levels

_GUIDANCE = "x-guidance"
_SHOWN = re.compile(r"[A-Za-z0-9_$.-]{1,64}")


def read_schema(source: str, limits: ConstraintLimits) -> dict[str, Any]:
    """The schema for llguidance, of JSON text.

    Raises:
        ConstraintError: it is no JSON, or `clean_schema` refuses it.
    """
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ConstraintError("The JSON schema is not valid JSON.") from None
    return clean_schema(schema, limits)


def clean_schema(schema: Any, limits: ConstraintLimits) -> dict[str, Any]:
    """The schema without annotations, white space between tokens bounded; every keyword in it is honoured.

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
    return root | {_GUIDANCE: {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{limits.max_whitespace}}}"}}


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
        return {
            name: self._keyword(name, item)
            for name, item in value.items()
            if self._counts(name, item, is_root)
        }

    def _counts(self, name: str, value: Any, is_root: bool) -> bool:
        """Whether the keyword must be honoured; it is then one that can be."""
        if name in VALUES:
            is_valid, words = VALUES[name]
            if not is_valid(value):
                raise ConstraintError(f"The JSON schema's '{name}' must be {words}.")
            return True
        if name in NEUTRAL and value is NEUTRAL[name]:
            return False
        is_annotation = name in ANNOTATIONS or (name.startswith(EXTENSION) and name != _GUIDANCE)
        # Elsewhere it would change what a $ref means.
        if is_annotation or (name == "$id" and is_root):
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
                for pattern in value:
                    self._check_pattern(name, pattern)
            return {key: self.schema(item) for key, item in value.items()}
        if name in SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            if len(value) > self._limits.max_alternatives:
                raise self._too_many(name, self._limits.max_alternatives)
            return [self.schema(item) for item in value]
        if name in SCHEMAS:
            return self.schema(value)
        self._check(name, value)
        return value

    def _check(self, name: str, value: Any) -> None:
        if name in ("enum", "required") and len(value) > self._limits.max_alternatives:
            raise self._too_many(name, self._limits.max_alternatives)
        if name == "pattern":
            self._check_pattern(name, value)
        if name == "multipleOf":
            self._add_divisor(value)

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            if pattern:
                check_regex(pattern, self._limits)
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
