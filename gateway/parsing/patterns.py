"""The regular expressions of response templates, as far as they say something plain.

They are never run on a model's text: what they say becomes a format, or is not understood."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Group:
    """A named group."""

    name: str


@dataclass(frozen=True, slots=True)
class Space:
    """White space, or none."""


Item: TypeAlias = str | Group | Space

_GROUP = re.compile(r"\(\?P<(\w+)>(?:\[[^\]]*\]|\\w|\.)[*+]\??\)")
_SPACE = re.compile(r"\\s[*+]\??")
_ESCAPED = re.compile(r"\\([^\w\s])|\\(n)|\\(t)")
_PLAIN = re.compile(r"[^\\()\[\]{}.*+?|^$]+")


def read_pattern(pattern: str) -> list[Item] | None:
    """The parts of a pattern: literal texts, named groups that take anything, white space. None: there is
    something else in it."""
    items: list[Item] = []
    position = 0
    while position < len(pattern):
        if match := _GROUP.match(pattern, position):
            items.append(Group(match[1]))
        elif match := _SPACE.match(pattern, position):
            items.append(Space())
        elif match := _ESCAPED.match(pattern, position):
            _add(items, match[1] or ("\n" if match[2] else "\t"))
        elif match := _PLAIN.match(pattern, position):
            _add(items, match[0])
        else:
            return None
        position = match.end()
    return items


def _add(items: list[Item], text: str) -> None:
    if items and isinstance(items[-1], str):
        items[-1] += text
    else:
        items.append(text)
