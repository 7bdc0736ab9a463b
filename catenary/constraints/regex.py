"""A regular expression before it is compiled: what it uses, how deep it is nested, and what it comes to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from catenary.constraints.kinds import ConstraintError, ConstraintLimits

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
    """Return the class whose bracket stands at `start`, for Rust, and the index behind it.

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
    """Read a code point, or a set of them as it is written; return it and the index after it."""
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
    """Return a character of a class in a form without another meaning, even where white space is left out."""
    char = chr(value)
    return char if char.isalnum() else f"\\u{{{value:x}}}"


_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_REPETITION = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
_BOUNDARIES = frozenset("bB<>")
_REFERENCES = frozenset("123456789k")
_BRACED = frozenset("pPux")


def read_regex(source: str, limits: ConstraintLimits) -> str:
    """Return the expression for Rust's `regex`, with the meaning that Python's `re` and ECMA-262 share.

    Character classes are written anew, for Rust has nested ones, `[:alpha:]`, `&&`, `--` and `~~` in them.

    Raises:
        ConstraintError: it is empty, uses look-around, a back reference or a word boundary, is too deep,
            or comes to too many characters. Other faults show when it is compiled.
    """
    if not source:
        raise ConstraintError("A regular expression must not be empty.")
    return _Scanner(source, limits).run()


@dataclass(slots=True)
class _Group:
    """Characters that the finished items of a group stand for, and of these the last item's."""

    size: int = 0
    last: int = 0
    # The last item is a repetition: a second may not follow, but a `?` may, which changes no language.
    repeated: bool = False


class _Scanner:
    def __init__(self, source: str, limits: ConstraintLimits) -> None:
        self._source = source
        self._limits = limits
        self._groups = [_Group()]
        self._position = 0

    def run(self) -> str:
        written: list[str] = []
        while self._position < len(self._source):
            start = self._position
            translated = self._step(self._source[start])
            written.append(translated or self._source[start : self._position])
            if self._groups[-1].size > self._limits.max_regex_size:
                raise ConstraintError(
                    "The regular expression stands for too many characters with its repetitions written out; "
                    f"at most {self._limits.max_regex_size} are allowed."
                )
        return "".join(written)

    def _step(self, char: str) -> str | None:
        """Take the next part. Returns it as Rust reads it, None where that is the same."""
        match char:
            case "\\":
                self._escape()
            case "[":
                translated, self._position = read_class(self._source, self._position)
                self._item(1)
                return translated
            case "(":
                self._open()
            case ")":
                self._close()
            case "{":
                self._repeat()
            case "*" | "+" | "?":
                self._position += 1
                self._repeats()
            case _:
                self._position += 1
                self._item(0 if char in "|^$" else 1)
        return None

    def _repeats(self) -> None:
        """Note a repetition, and take the `?` behind it. Rust reads a second one as one of the first's, which
        in Python is possessive or an error."""
        group = self._groups[-1]
        if group.repeated:
            raise ConstraintError("The regular expression repeats a repetition, or has a possessive one.")
        group.repeated = True
        self._position += self._source.startswith("?", self._position)

    def _item(self, size: int) -> None:
        group = self._groups[-1]
        group.repeated = False
        group.size += size
        if size:
            group.last = size

    def _escape(self) -> None:
        following = self._source[self._position + 1 : self._position + 2]
        if not following:
            raise ConstraintError("The regular expression ends inside of an escape.")
        if following in _REFERENCES:
            raise ConstraintError("Back references are not supported in regular expressions.")
        if following in _BOUNDARIES:
            raise ConstraintError("Word boundaries are not supported in regular expressions.")
        self._position += 2
        if following in _BRACED and self._source[self._position : self._position + 1] == "{":
            end = self._source.find("}", self._position)
            self._position = len(self._source) if end < 0 else end + 1
        self._item(1)

    def _open(self) -> None:
        rest = self._source[self._position : self._position + 4]
        if rest.startswith(_LOOK_AROUND):
            raise ConstraintError("Look-around is not supported in regular expressions.")
        if rest.startswith("(?>"):
            raise ConstraintError("Atomic groups are not supported in regular expressions.")
        if rest.startswith("(?P="):
            raise ConstraintError("Back references are not supported in regular expressions.")
        if len(self._groups) > self._limits.max_depth:
            raise ConstraintError(
                f"The regular expression is nested deeper than {self._limits.max_depth} groups."
            )
        self._groups.append(_Group())
        self._position += 1

    def _close(self) -> None:
        if len(self._groups) == 1:
            raise ConstraintError("The regular expression has a parenthesis that is not opened.")
        inner = self._groups.pop()
        self._position += 1
        self._item(max(1, inner.size))

    def _repeat(self) -> None:
        found = _REPETITION.match(self._source, self._position)
        if found is None:
            raise ConstraintError("The regular expression has a '{' that begins no repetition; write '\\{'.")
        # Without an upper bound the copies up to the lower one are written out.
        times = int(found[3] or found[1])
        group = self._groups[-1]
        group.size += group.last * (max(1, times) - 1)
        group.last *= max(1, times)
        self._position = found.end()
        self._repeats()
