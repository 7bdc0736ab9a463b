"""How deep and how large a JSON value is, found without recursion: values of callers may be hostile."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any


class Excess(Enum):
    """Which bound a value is beyond."""

    DEPTH = "depth"
    VALUES = "values"


def json_levels(value: Any) -> Iterator[list[Any]]:
    """Yield the value alone, then all values directly in it, and so on to the innermost: never an empty list.
    A level is made when it is asked for: a caller that stops early walks no further."""
    level = [value]
    while level:
        yield level
        containers = (item for item in level if isinstance(item, dict | list))
        level = [
            child for item in containers for child in (item.values() if isinstance(item, dict) else item)
        ]


def json_excess(value: Any, max_depth: int, max_values: int) -> Excess | None:
    """Return the bound that a value breaks first, from outside in; None: it is within both.

    max_depth: arrays and objects inside of one another. max_values: values in all, the outermost left out."""
    values = -1
    for depth, level in enumerate(json_levels(value)):
        values += len(level)
        if values > max_values:
            return Excess.VALUES
        if depth >= max_depth and any(isinstance(item, dict | list) for item in level):
            return Excess.DEPTH
    return None
