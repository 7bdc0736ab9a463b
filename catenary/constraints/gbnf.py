"""GBNF, the notation of llama.cpp: read to a tree, checked, and written as Lark.

A lexeme of Lark takes as many characters as it can, a rule of GBNF any number that lets the rest match. So
each character becomes a lexeme of its own, and the parser has the choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.lark import lark_text

_HEAD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)[ \t]*::=")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_REPETITION = re.compile(r"\{[ \t]{0,4}([0-9]{1,9})[ \t]{0,4}(,?)[ \t]{0,4}([0-9]{0,9})[ \t]{0,4}\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_CODE_POINTS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranges of characters, ends included."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Item
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives of sequences."""

    alternatives: tuple[tuple[_Item, ...], ...]


_Item = _Text | _Class | _Rule | _Repeat | _Group


def gbnf_to_lark(source: str, limits: ConstraintLimits) -> str:
    """Return the same grammar for llguidance.

    Raises:
        ConstraintError: it is malformed, too large, has no rule `root`, names a rule that it does not define,
            or `root` has no end.
    """
    rules = _Reader(source, limits).rules()
    if "root" not in rules:
        raise ConstraintError("The grammar has no rule 'root'.")
    for group in rules.values():
        for name in _names(group):
            if name not in rules:
                raise ConstraintError("The grammar uses a name that it does not define.")
    if "root" not in _ending(rules):
        raise ConstraintError("The grammar's rules refer to each other in a circle that no text ends.")
    names = {name: "start" if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    return "\n".join(f"{names[name]}: {_write(group, names, outer=True)}" for name, group in rules.items())


def _names(item: _Item) -> Iterator[str]:
    match item:
        case _Rule(name):
            yield name
        case _Repeat(inner):
            yield from _names(inner)
        case _Group(alternatives):
            for sequence in alternatives:
                for part in sequence:
                    yield from _names(part)


def _ending(rules: dict[str, _Group]) -> set[str]:
    """Return the names of the rules that a finite text can match: the least fixpoint."""
    ending: set[str] = set()

    def ends(item: _Item) -> bool:
        match item:
            case _Rule(name):
                return name in ending
            case _Repeat(inner, least):
                return least == 0 or ends(inner)
            case _Group(alternatives):
                return any(all(ends(part) for part in sequence) for sequence in alternatives)
        return True

    while True:
        more = {name for name, group in rules.items() if name not in ending and ends(group)}
        if not more:
            return ending
        ending |= more


def _write(item: _Item, names: dict[str, str], *, outer: bool = False) -> str:
    match item:
        case _Text(text):
            return " ".join(lark_text(char) for char in text) or '""'
        case _Class(ranges, negated):
            inside = "".join(
                _char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in ranges
            )
            return f"/[{'^' if negated else ''}{inside}]/"
        case _Rule(name):
            return names[name]
        case _Repeat(inner, least, most):
            bounds = f"{least},{'' if most is None else most}"
            return f"({_write(inner, names)}){{{bounds}}}"
        case _Group(alternatives):
            text = " | ".join(
                " ".join(_write(part, names) for part in sequence) or '""' for sequence in alternatives
            )
            return text if outer else f"({text})"


def _char(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


class _Reader:
    def __init__(self, source: str, limits: ConstraintLimits) -> None:
        self._source = source
        self._limits = limits
        self._position = 0

    def rules(self) -> dict[str, _Group]:
        found: dict[str, _Group] = {}
        self._skip()
        while self._position < len(self._source):
            head = _HEAD.match(self._source, self._position)
            if head is None:
                raise self._malformed("a rule is expected")
            if head[1] in found:
                raise ConstraintError("The grammar defines a name twice.")
            if len(found) == self._limits.max_rules:
                raise ConstraintError(f"The grammar has more than {self._limits.max_rules} rules.")
            self._position = head.end()
            self._skip()
            found[head[1]] = self._group(0)
        if not found:
            raise ConstraintError("The grammar must not be empty.")
        return found

    def _group(self, depth: int) -> _Group:
        if depth > self._limits.max_depth:
            raise ConstraintError(f"The grammar is nested deeper than {self._limits.max_depth} groups.")
        alternatives = [self._sequence(depth)]
        while self._peek() == "|":
            self._advance()
            alternatives.append(self._sequence(depth))
        return _Group(tuple(alternatives))

    def _sequence(self, depth: int) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while (char := self._peek()) not in ("", "|", ")") and not self._at_rule():
            if char in "*+?{":
                if not items or isinstance(items[-1], _Repeat):
                    raise self._malformed("there is nothing to repeat")
                items.append(self._repeat(items.pop()))
            else:
                items.append(self._atom(char, depth))
            self._skip()
        if len(items) > self._limits.max_alternatives:
            raise ConstraintError(
                f"The grammar has more than {self._limits.max_alternatives} items in a sequence."
            )
        return tuple(items)

    def _at_rule(self) -> bool:
        return _HEAD.match(self._source, self._position) is not None

    def _atom(self, char: str, depth: int) -> _Item:
        if char == '"':
            self._position += 1
            return _Text("".join(self._chars('"')))
        if char == "[":
            return self._class()
        if char == ".":
            self._position += 1
            return _Class((("\n", "\n"),), negated=True)
        if char == "(":
            self._advance()
            group = self._group(depth + 1)
            if self._peek() != ")":
                raise self._malformed("a parenthesis is not closed")
            self._position += 1
            return group
        name = _NAME.match(self._source, self._position)
        if name is None:
            raise self._malformed("a name, a text or a class is expected")
        self._position = name.end()
        return _Rule(name[0])

    def _repeat(self, item: _Item) -> _Item:
        char = self._peek()
        if char != "{":
            self._position += 1
            return _Repeat(item, 1 if char == "+" else 0, 1 if char == "?" else None)
        found = _REPETITION.match(self._source, self._position)
        if found is None:
            raise self._malformed("a repetition is expected")
        self._position = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > self._limits.max_regex_size:
            raise ConstraintError(
                f"The grammar repeats something more than {self._limits.max_regex_size} times."
            )
        if most is not None and most < max(1, least):
            raise self._malformed("a repetition has no number")
        return _Repeat(item, least, most)

    def _class(self) -> _Class:
        self._position += 1
        negated = self._peek() == "^"
        self._position += negated
        chars = list(self._chars("]", ranges=True))
        ranges: list[tuple[str, str]] = []
        while chars:
            first = chars.pop(0)
            last = first
            if len(chars) > 1 and chars[0] == "":
                last = chars[1]
                del chars[:2]
            if first == "" or last < first:
                raise self._malformed("a class has a bad range")
            ranges.append((first, last))
        if not ranges:
            raise self._malformed("a class is empty")
        return _Class(tuple(ranges), negated)

    def _chars(self, end: str, *, ranges: bool = False) -> Iterator[str]:
        """Read characters up to `end`; with `ranges`, a dash between two of them is the empty text."""
        first = True
        while True:
            char = self._peek()
            if char in ("", "\n"):
                raise self._malformed("a text or a class is not closed")
            self._position += 1
            if char == end:
                return
            if char == "\\":
                yield self._escape()
            elif ranges and char == "-" and not first and self._peek() != end:
                yield ""
            else:
                yield char
            first = False

    def _escape(self) -> str:
        char = self._peek()
        self._position += 1
        if char in _CODE_POINTS and char:
            digits = self._source[self._position : self._position + _CODE_POINTS[char]]
            self._position += len(digits)
            try:
                return chr(int(digits, 16)).encode().decode()
            except (ValueError, OverflowError):
                raise self._malformed("an escape is no character") from None
        return _ESCAPES.get(char, char)

    def _peek(self) -> str:
        return self._source[self._position : self._position + 1]

    def _advance(self) -> None:
        self._position += 1
        self._skip()

    def _skip(self) -> None:
        found = _SPACE.match(self._source, self._position)
        self._position = found.end() if found else self._position

    def _malformed(self, what: str) -> ConstraintError:
        line = self._source.count("\n", 0, self._position) + 1
        return ConstraintError(f"The grammar is malformed in line {line}: {what}.")
