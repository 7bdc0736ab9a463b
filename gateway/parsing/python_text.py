"""Values in Python's syntax, turned into JSON as they come. Nothing is evaluated."""

from __future__ import annotations

import json
import re

from gateway.parsing.json_text import MAX_DEPTH, escape_control, peek_run
from gateway.parsing.source import Emit, Malformed, Scan, Source

_MAX_WORD = 400
_PLAIN = re.compile(r"[^'\"\\\x00-\x1f]+")
_WORD_CHARS = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*)?(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]*")
_KEYWORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {
    "n": "\\n",
    "r": "\\r",
    "t": "\\t",
    "b": "\\b",
    "f": "\\f",
    "\\": "\\\\",
    '"': '\\"',
    "'": "'",
}
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def python_value(source: Source, emit: Emit) -> Scan[None]:
    """Read a literal and give JSON to `emit`: strings, numbers, True, False, None, lists, tuples, dicts.

    Raises Malformed for anything else, calls and operators included, CutShort if the text ends in it."""
    stack: list[str] = []
    while True:
        closed = yield from _item(source, emit, stack)
        while closed:
            if not stack:
                return
            closed = yield from _separator(source, emit, stack)


def _item(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    char = yield from source.skip_space()
    if char in _CLOSERS:
        if len(stack) >= MAX_DEPTH:
            raise Malformed
        emit("{" if char == "{" else "[")
        source.take(1)
        stack.append(_CLOSERS[char])
        return (yield from _next_item(source, emit, stack))
    if char in "'\"":
        yield from python_string(source, emit)
    else:
        yield from _word(source, emit)
    return True


def _next_item(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    """Where an item of a container may begin, or the container end; true if it does."""
    if (yield from source.skip_space()) == stack[-1]:
        source.take(1)
        emit("}" if stack.pop() == "}" else "]")
        return True
    if stack[-1] == "}":
        yield from _key(source, emit)
    return False


def _separator(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    char = yield from source.skip_space()
    if char == ",":
        source.take(1)
        # JSON has no comma behind the last item.
        if (yield from source.skip_space()) != stack[-1]:
            emit(", ")
    elif char != stack[-1]:
        raise Malformed
    return (yield from _next_item(source, emit, stack))


def _key(source: Source, emit: Emit) -> Scan[None]:
    """A dict's key; JSON knows only strings."""
    if (yield from source.next()) in "'\"":
        yield from python_string(source, emit)
    else:
        pieces: list[str] = []
        yield from _word(source, pieces.append)
        emit(json.dumps("".join(pieces)))
    if (yield from source.skip_space()) != ":":
        raise Malformed
    source.take(1)
    emit(": ")


def python_string(source: Source, emit: Emit) -> Scan[None]:
    """A string in either kind of quotes, as a JSON string. Raises Malformed for an escape that is none."""
    quote = source.take(1)
    emit('"')
    while True:
        char = yield from source.next()
        if char == quote:
            source.take(1)
            emit('"')
            return
        if char == "\\":
            yield from _escape(source, emit)
        elif plain := _PLAIN.match(source.text, source.pos):
            emit(source.take(plain.end() - source.pos))
        elif char in "'\"":
            source.take(1)
            emit('\\"' if char == '"' else char)
        else:
            emit(escape_control(source.take(1)))


def _escape(source: Source, emit: Emit) -> Scan[None]:
    kind = (yield from source.ahead(2))[1]
    if kind in _CODES:
        digits = (yield from source.ahead(2 + _CODES[kind]))[2:]
        if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
            raise Malformed
        source.take(2 + len(digits))
        char = chr(int(digits, 16))
        emit(json.dumps(char, ensure_ascii=not char.isprintable())[1:-1])
        return
    source.take(2)
    if kind != "\n":
        # Python keeps the backslash of an escape that it does not know.
        emit(_ESCAPES.get(kind) or "\\\\" + json.dumps(kind, ensure_ascii=False)[1:-1])


def _word(source: Source, emit: Emit) -> Scan[None]:
    """A number or a keyword, shown whole."""
    word = yield from peek_run(source, _WORD_CHARS, _MAX_WORD)
    if word in _KEYWORDS:
        shown = _KEYWORDS[word]
    elif _NUMBER.fullmatch(word) and any(char.isdigit() for char in word):
        shown = _json_number(word)
    else:
        raise Malformed
    source.take(len(word))
    emit(shown)


def _json_number(word: str) -> str:
    """Python's spellings that JSON lacks: `1_000`, `+1`, `.5`, `1.`."""
    sign, digits = ("-" if word.startswith("-") else ""), word.lstrip("-+").replace("_", "")
    mantissa, mark, exponent = digits.lower().partition("e")
    integer, point, fraction = mantissa.partition(".")
    if not integer and not fraction:
        raise Malformed
    number = (integer.lstrip("0") or "0") + (f".{fraction or '0'}" if point else "")
    return f"{sign}{number}{mark}{exponent}"
