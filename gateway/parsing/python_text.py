"""Conversion of values in Python's syntax to JSON as they arrive. Nothing is evaluated."""

from __future__ import annotations

import json
import re

from gateway.parsing.json_text import MAX_DEPTH, escape_control, peek_run
from gateway.parsing.source import Emit, Malformed, Scan, Source

# Characters of a name or number of a call in Python's syntax, as for JSON.
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
    "a": "\\u0007",
    "v": "\\u000b",
    "\\": "\\\\",
    '"': '\\"',
    "'": "'",
}
_CODES = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]{1,3}")
_BASED = re.compile(r"[-+]?0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
# Prefixes of a string that is a literal: raw, or without effect.
_PREFIXES = frozenset("rRuU")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def python_value(source: Source, emit: Emit, depth: int = 0) -> Scan[None]:
    """Read a literal and emit it as JSON: strings, numbers, True, False, None, lists, tuples, dicts.

    `depth`: containers around it. Raises Malformed for anything else, such as f-strings, calls and operators,
    and CutShort if the text ends in it."""
    stack: list[str] = []
    while True:
        closed = yield from _item(source, emit, stack, depth)
        while closed:
            if not stack:
                return
            closed = yield from _separator(source, emit, stack)


def _item(source: Source, emit: Emit, stack: list[str], depth: int) -> Scan[bool]:
    char = yield from source.skip_space()
    if char in _CLOSERS and len(stack) + depth >= MAX_DEPTH:
        raise Malformed
    if char == "(":
        yield from _parenthesis(source, emit, len(stack) + depth + 1)
        return True
    if char in _CLOSERS:
        emit(source.take(1))
        stack.append(_CLOSERS[char])
        return (yield from _next_item(source, emit, stack))
    if char in "'\"":
        yield from python_string(source, emit)
    else:
        yield from _word(source, emit)
    return True


def _parenthesis(source: Source, emit: Emit, depth: int) -> Scan[None]:
    """Read a tuple, or one value in parentheses."""
    source.take(1)
    first: list[str] = []
    if (yield from source.skip_space()) != ")":
        yield from python_value(source, first.append, depth)
        if (yield from source.skip_space()) == ")":
            source.take(1)
            emit("".join(first))
            return
    emit("[" + "".join(first))
    while (char := (yield from source.skip_space())) != ")":
        if char != "," or not first:
            raise Malformed
        source.take(1)
        if (yield from source.skip_space()) != ")":
            emit(", ")
            yield from python_value(source, emit, depth)
    source.take(1)
    emit("]")


def _next_item(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    """Read up to the next item of a container or its end; return whether an item follows."""
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
    """Read a dict's key; JSON knows only strings."""
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


def python_string(source: Source, emit: Emit, *, raw: bool = False) -> Scan[None]:
    """Read a string in any kind of quotes, and those right behind it, as one JSON string. `raw`: the first
    one has no escapes. Raises Malformed for an invalid escape."""
    emit('"')
    yield from _quoted(source, emit, raw=raw)
    while (raw_next := (yield from _another(source))) is not None:
        yield from _quoted(source, emit, raw=raw_next)
    emit('"')


def _another(source: Source) -> Scan[bool | None]:
    """Read up to the quotes of a further string; return whether it is raw, or None if none follows."""
    while (char := (yield from source.peek())).isspace():
        source.take(1)
    if char in ("'", '"'):
        return False
    if char not in _PREFIXES:
        return None
    for quote in ("'", '"'):
        if (yield from source.matching(char + quote)):
            source.take(1)
            return char in "rR"
    return None


def _quoted(source: Source, emit: Emit, *, raw: bool) -> Scan[None]:
    """Read the text between the quotes that come next."""
    quote = yield from source.next()
    if (yield from source.matching(quote * 3)):
        quote *= 3
    source.take(len(quote))
    while True:
        char = yield from source.next()
        if char == quote[0] and (yield from source.accept(quote)):
            return
        if char == "\\" and raw:
            # The backslash stays, and so does the character behind it.
            emit(json.dumps((yield from source.ahead(2)), ensure_ascii=False)[1:-1])
            source.take(2)
        elif char == "\\":
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
    if kind in "01234567":
        octal = _OCTAL.match((yield from source.ahead(4)), 1)
        digits = octal[0] if octal else ""
        source.take(1 + len(digits))
        emit(json.dumps(chr(int(digits, 8)))[1:-1])
        return
    if kind == "N":
        raise Malformed
    source.take(2)
    if kind != "\n":
        # Python keeps the backslash of an escape that it does not know.
        emit(_ESCAPES.get(kind) or "\\\\" + json.dumps(kind, ensure_ascii=False)[1:-1])


def _word(source: Source, emit: Emit) -> Scan[None]:
    """Read a number or a keyword, which is emitted whole."""
    word = yield from peek_run(source, _WORD_CHARS, _MAX_WORD)
    if word in _PREFIXES and source.text[source.pos + 1] in "'\"":
        source.take(1)
        yield from python_string(source, emit, raw=word in "rR")
        return
    if word in _KEYWORDS:
        shown = _KEYWORDS[word]
    elif _NUMBER.fullmatch(word) and any(char.isdigit() for char in word):
        shown = _json_number(word)
    elif _BASED.fullmatch(word):
        shown = str(int(word, 0))
    else:
        raise Malformed
    source.take(len(word))
    emit(shown)


def _json_number(word: str) -> str:
    """Return a number in JSON whose spelling only Python has: `1_000`, `+1`, `.5`, `1.`."""
    sign, digits = ("-" if word.startswith("-") else ""), word.lstrip("-+").replace("_", "")
    mantissa, mark, exponent = digits.lower().partition("e")
    integer, point, fraction = mantissa.partition(".")
    if not integer and not fraction:
        raise Malformed
    number = (integer.lstrip("0") or "0") + (f".{fraction or '0'}" if point else "")
    return f"{sign}{number}{mark}{exponent}"
