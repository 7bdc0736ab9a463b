"""Character classes of regular expressions: read as Python's `re` and ECMA-262 do, written for Rust's
`regex`.

There everything but a range, an escape, a leading `^` and the closing bracket is itself.
"""

from __future__ import annotations

import re

from catenary.constraints.kinds import ConstraintError

# Sets of characters, which cannot begin or end a range.
_SETS = frozenset("dDsSwW")
_CONTROLS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PROPERTY = re.compile(r"\\[pP](?:\{[A-Za-z0-9_=^ -]{1,64}\}|[A-Z])")
_CODE_POINT = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xu]\{([0-9A-Fa-f]{1,6})\})"
)
_HIGH, _LOW, _PAIR_END = 0xD800, 0xDC00, 0xE000
_LAST = 0x10FFFF


def read_class(source: str, start: int) -> tuple[str, int]:
    """The class whose bracket stands at `start`, for Rust, and the index behind it.

    Raises:
        ConstraintError: it is not closed, has a range that goes down, or an escape that means nothing.
    """
    position = start + 1
    negated = source.startswith("^", position)
    position += negated
    written: list[str] = []
    first = position
    while True:
        if position >= len(source):
            raise ConstraintError("The regular expression has a character class that is not closed.")
        # As the first it is itself: no class is empty.
        if source[position] == "]" and position > first:
            return f"[{'^' if negated else ''}{''.join(written)}]", position + 1
        item, position = _item(source, position)
        following = source[position + 1 : position + 2]
        if source.startswith("-", position) and following not in ("", "]"):
            last, behind = _item(source, position + 1)
            if isinstance(item, int) and isinstance(last, int):
                if last < item:
                    raise ConstraintError("The regular expression has a character class with a bad range.")
                written.append(f"{_char(item)}-{_char(last)}")
                position = behind
                continue
        written.append(item if isinstance(item, str) else _char(item))


def _item(source: str, position: int) -> tuple[int | str, int]:
    """A code point, or a set of them as it is written, and the index behind."""
    if source[position] != "\\":
        return ord(source[position]), position + 1
    kind = source[position + 1 : position + 2]
    if kind in _SETS:
        return "\\" + kind, position + 2
    if (found := _PROPERTY.match(source, position)) is not None:
        return found[0], found.end()
    if (found := _CODE_POINT.match(source, position)) is not None:
        return _code_point(source, found)
    if kind in _CONTROLS:
        return ord(_CONTROLS[kind]), position + 2
    if not kind or (kind.isascii() and kind.isalnum()):
        raise ConstraintError("The regular expression has an escape in a character class that is not known.")
    return ord(kind), position + 2


def _code_point(source: str, found: re.Match[str]) -> tuple[int, int]:
    value, end = int(next(filter(None, found.groups())), 16), found.end()
    if _HIGH <= value < _LOW:
        # Half of a character beyond the first 65,536, as ECMA-262 writes one.
        other = _CODE_POINT.match(source, end)
        low = int(other[2], 16) if other is not None and other[2] else 0
        if other is not None and _LOW <= low < _PAIR_END:
            return 0x10000 + ((value - _HIGH) << 10) + (low - _LOW), other.end()
    if _HIGH <= value < _PAIR_END or value > _LAST:
        raise ConstraintError("The regular expression has an escape that is no character.")
    return value, end


def _char(value: int) -> str:
    """A character of a class that has no other meaning there, not even where white space is left out."""
    char = chr(value)
    return char if char.isalnum() else f"\\u{{{value:x}}}"
