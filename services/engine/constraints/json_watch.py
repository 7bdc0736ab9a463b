"""Rules of JSON that grammars cannot express: numbers end, and names are unique in their object.

A text is followed byte by byte, and tokens are forbidden that would break a rule, as long as others may
follow.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from catenary.constraints import ConstraintKind
from services.engine.constraints.vocabulary import Bits, Vocabulary, bits_of
from services.engine.domain import ConstraintOptions

# Numbers beyond the range of a double are of no use to most readers.
_EXPONENT_DIGITS: Final = 3
_DIGITS: Final = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
# Characters of JSON outside of strings; the letters are those of its three names and of exponents.
_OUTSIDE: Final = frozenset(b'{}[]:,"+-.0123456789eE \t\r\ntrufalsn')
_QUOTED: Final = re.compile(rb'"(?=((?:[^"\\]|\\.)*)")', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonParts:
    """Parts of a constrained text that are JSON: behind each of `begins`, up to the first text that is not,
    and, if `whole`, from its beginning on."""

    begins: tuple[str, ...] = ()
    whole: bool = False


def json_parts(options: ConstraintOptions) -> JsonParts | None:
    """Return the parts of a compiled constraint's texts that are JSON; None: none is."""
    match options.kind:
        case ConstraintKind.JSON_SCHEMA:
            return JsonParts(whole=True)
        case ConstraintKind.GRAMMAR if "%json" in options.source:
            return JsonParts(whole=True)
        case ConstraintKind.STRUCTURAL_TAG:
            tags = json.loads(options.source)
            begins = [
                one["begin"]
                for tag in tags["structures"]
                for one in (tag, *(tag.get("parameters") or ()))
                if one.get("schema") is not None
            ]
            whole = tags.get("otherwise") is not None
            return JsonParts(tuple(dict.fromkeys(begins)), whole) if begins or whole else None
    return None


class JsonTokens:
    """Tokens of a vocabulary as pieces of JSON. Numbers have at most `digits` digits before and behind
    the point."""

    def __init__(self, vocabulary: Vocabulary, digits: int) -> None:
        self.vocabulary = vocabulary
        self.digits = digits

    def prepare(self) -> None:
        """Make the tables, which takes up to a second for a large vocabulary: not between two steps."""
        _ = self._digit_sets, self.wide, self.quoted, self.vocabulary.order

    @cached_property
    def _digit_sets(self) -> list[Bits]:
        """At index n the tokens that begin with more than n digits; behind the last there are none."""
        counts = [len(text) - len(text.lstrip(b"0123456789")) for text in self.vocabulary.texts]
        return [
            bits_of((i for i, count in enumerate(counts) if count > least), self.vocabulary.words)
            for least in range(max(counts, default=0))
        ]

    @cached_property
    def wide(self) -> Bits | None:
        """Tokens that have too many digits in them, wherever a number began; None: there are none."""
        pattern = re.compile(
            rb'[^"]*(?:[0-9]{%d}|[0-9.][eE][+-]?[0-9]{%d})' % (self.digits + 1, _EXPONENT_DIGITS + 1)
        )
        found = [i for i, text in enumerate(self.vocabulary.texts) if pattern.match(text)]
        return bits_of(found, self.vocabulary.words) if found else None

    @cached_property
    def quoted(self) -> dict[bytes, list[int]]:
        """Tokens by the texts that stand between two quotes in them."""
        found: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.vocabulary.texts):
            for content in _QUOTED.findall(text) if text.count(b'"') > 1 else ():
                found.setdefault(content, []).append(token_id)
        return found

    def more_digits(self, most: int) -> Bits | None:
        """Tokens that begin with more digits than this; None: there are none."""
        sets = self._digit_sets
        return sets[max(0, most)] if max(0, most) < len(sets) else None

    def beginning(self, text: bytes) -> Iterator[int]:
        """Tokens that begin with this text."""
        texts, order = self.vocabulary.texts, self.vocabulary.order
        for token_id in order[bisect_left(order, text, key=texts.__getitem__) :]:
            if not texts[token_id].startswith(text):
                return
            yield token_id


@dataclass(slots=True)
class _Level:
    """An object or an array. `names`: of the object's members so far, None for an array; `name_next`: a name
    comes next; `tried`: in a trial, the names that it adds, while `names` is shared with the text's place."""

    names: set[bytes] | None
    name_next: bool
    tried: set[bytes] | None = None

    def trial(self) -> _Level:
        """Return a copy for a trial, in constant time."""
        return _Level(self.names, self.name_next, set())

    def add(self, name: bytes) -> bool:
        """Add the name of a member. Returns whether the object has it already; False for an array."""
        if self.names is None:
            return False
        known = name in self.names or (self.tried is not None and name in self.tried)
        (self.names if self.tried is None else self.tried).add(name)
        return known


@dataclass(slots=True)
class _Place:
    """A place in a JSON text. `string`: the open name's bytes behind its quote; of any other open string
    nothing is kept. `part`: 0, 1 and 2 before a number's point, behind it and in its exponent, of which `run`
    digits were seen. `repeated`: an object has got a name twice."""

    levels: list[_Level] = field(default_factory=list)
    string: bytearray | None = None
    escaped: bool = False
    is_name: bool = False
    part: int = 0
    run: int = 0
    repeated: bool = False

    def trial(self) -> _Place:
        """Return the same place, from which to go on by a token that may not be taken."""
        string = None if self.string is None else bytearray(self.string)
        levels = [level.trial() for level in self.levels]
        return _Place(levels, string, self.escaped, self.is_name, self.part, self.run)

    def feed(self, text: bytes) -> int:
        """Advance by a text. Return how much of it is JSON."""
        if self.string is not None and not self.escaped and b'"' not in text and b"\\" not in text:
            if self.is_name:
                self.string += text
            return len(text)
        for index, byte in enumerate(text):
            if self.string is not None:
                self._in_string(self.string, byte)
            elif byte not in _OUTSIDE:
                return index
            else:
                self._outside(byte)
        return len(text)

    def _in_string(self, string: bytearray, byte: int) -> None:
        if byte == _QUOTE and not self.escaped:
            if self.is_name and self.levels:
                self.repeated |= self.levels[-1].add(bytes(string))
            self.string = None
            return
        self.escaped = byte == _BACKSLASH and not self.escaped
        if self.is_name:
            string.append(byte)

    def _outside(self, byte: int) -> None:
        if byte in _DIGITS:
            self.run += 1
            return
        if byte in b"+-" and self.part == 2:
            return
        number, self.part, self.run = self.run, 0, 0
        top = self.levels[-1] if self.levels else None
        match chr(byte):
            case ".":
                self.part = 1
            case "e" | "E" if number:
                self.part = 2
            case '"':
                self.string, self.is_name = bytearray(), top is not None and top.name_next
            case "{":
                self.levels.append(_Level(set(), name_next=True))
            case "[":
                self.levels.append(_Level(None, name_next=False))
            case "}" | "]" if self.levels:
                self.levels.pop()
            case "," if top is not None:
                top.name_next = top.names is not None
            case ":" if top is not None:
                top.name_next = False


class JsonWatch:
    """Place of one text in JSON, and the tokens that it excludes."""

    def __init__(self, parts: JsonParts, tokens: JsonTokens) -> None:
        self._tokens = tokens
        begins = [begin.encode() for begin in parts.begins]
        self._begin = re.compile(b"|".join(map(re.escape, begins))) if begins else None
        self._longest = max(map(len, begins), default=0)
        self._tail = b""
        self._place = _Place() if parts.whole else None

    def feed(self, text: bytes) -> None:
        """Advance by a token's text."""
        while text:
            if self._place is not None:
                used = self._place.feed(text)
                if used == len(text):
                    return
                self._place, self._tail, text = None, b"", text[used:]
            if self._begin is None:
                return
            seen = self._tail + text
            found = self._begin.search(seen)
            if found is None:
                self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else b""
                return
            self._place, text = _Place(), seen[found.end() :]

    def forbidden(self) -> Bits | None:
        """Return the tokens that may not follow; None: any may."""
        place, tokens = self._place, self._tokens
        if place is None:
            return None
        sets: list[Bits | None] = []
        if place.string is None:
            most = _EXPONENT_DIGITS if place.part == 2 else tokens.digits
            sets += [tokens.more_digits(most - place.run), tokens.wide]
        repeats = list(self._repeats(place))
        if repeats:
            sets.append(bits_of(repeats, tokens.vocabulary.words))
        found = [bits for bits in sets if bits is not None]
        return None if not found else found[0] if len(found) == 1 else _union(found)

    def _repeats(self, place: _Place) -> Iterator[int]:
        """Return the tokens that would end a name which the object has already."""
        known = [level.names for level in place.levels if level.names]
        if not known:
            return
        if place.string is not None and place.is_name and not place.escaped:
            seen = bytes(place.string)
            for name in place.levels[-1].names or ():
                if name.startswith(seen):
                    yield from self._tokens.beginning(name[len(seen) :] + b'"')
        quoted, texts = self._tokens.quoted, self._tokens.vocabulary.texts
        for names in known:
            for name in names & quoted.keys():
                for token_id in quoted[name]:
                    there = place.trial()
                    there.feed(texts[token_id])
                    if there.repeated:
                        yield token_id


def _union(sets: list[Bits]) -> Bits:
    whole = sets[0].copy()
    for bits in sets[1:]:
        whole |= bits
    return whole
