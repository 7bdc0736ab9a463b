"""Texts that may also come as token ids."""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from gateway.schemas.base import FieldError

PROMPTS_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def read_prompts(value: Any, most: int, what: str) -> list[str] | list[list[int]]:
    """Every form as a list of at most `most` texts or id lists, called `what`; quick for millions of ids.

    Raises FieldError.
    """
    given = value
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    listed = not isinstance(given, str)
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if len(value) > most:
        raise FieldError(f"Invalid '{{param}}': at most {most} {what} are allowed.")
    if kinds == {list} and any(set(map(type, ids)) - {int} for ids in value):
        kinds = set()
    if kinds not in ({str}, {list}) and value:
        raise FieldError("Invalid type for '{param}': expected " + _KINDS + ".", "invalid_type")
    if not value or not all(value):
        empty = next((str(place) for place, item in enumerate(value) if not item), "")
        raise FieldError(f"Invalid '{{param}}': {what} must not be empty.", at=empty if listed else "")
    return list(value)
