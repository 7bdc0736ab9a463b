"""JSON as a model writes it: checked and passed on character by character."""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.parsing.source import CutShort, Emit, Malformed, Scan, Source

# Of arguments in a call. Python's recursion bounds the depth, and a double has no more digits than that.
MAX_DEPTH = 64
_MAX_NUMBER = 400

# Each is a single class or a fixed sequence of them: nothing to backtrack into.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER_CHARS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def escape_control(char: str) -> str:
    """Return a control character as JSON writes it in a string."""
    return _CONTROL.get(char) or f"\\u{ord(char):04x}"


def json_value(source: Source, emit: Emit) -> Scan[None]:
    """Read one value and give its text to `emit` as it comes.

    The text is the model's own, but control characters in strings are escaped. Raises Malformed where it
    is not JSON or is nested too deeply, CutShort if the text ends in it."""
    stack: list[str] = []
    while True:
        closed = yield from _item(source, emit, stack)
        while closed:
            if not stack:
                return
            closed = yield from _separator(source, emit, stack)


def _item(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    """Read one scalar, or the start of a container; return whether a value is complete."""
    char = yield from _space(source, emit)
    if char == "{":
        return (yield from _open(source, emit, stack, "}"))
    if char == "[":
        return (yield from _open(source, emit, stack, "]"))
    if char == '"':
        yield from json_string(source, emit)
    elif char in _WORDS:
        yield from _word(source, emit, _WORDS[char])
    else:
        yield from _number(source, emit)
    return True


def _open(source: Source, emit: Emit, stack: list[str], closer: str) -> Scan[bool]:
    if len(stack) >= MAX_DEPTH:
        raise Malformed
    emit(source.take(1))
    if (yield from _space(source, emit)) == closer:
        emit(source.take(1))
        return True
    stack.append(closer)
    if closer == "}":
        yield from _key(source, emit)
    return False


def _separator(source: Source, emit: Emit, stack: list[str]) -> Scan[bool]:
    """Read the separator or end behind a value in a container; return whether that closes it."""
    char = yield from _space(source, emit)
    if char == stack[-1]:
        emit(source.take(1))
        stack.pop()
        return True
    if char != ",":
        raise Malformed
    emit(source.take(1))
    if stack[-1] == "}":
        yield from _space(source, emit)
        yield from _key(source, emit)
    return False


def _key(source: Source, emit: Emit) -> Scan[None]:
    yield from json_string(source, emit)
    if (yield from _space(source, emit)) != ":":
        raise Malformed
    emit(source.take(1))


def _space(source: Source, emit: Emit) -> Scan[str]:
    """Pass on white space, which is the model's own too. Return the next character, unread."""
    while True:
        char = yield from source.next()
        space = _SPACE.match(source.text, source.pos)
        if space is None or space.end() == source.pos:
            return char
        emit(source.take(space.end() - source.pos))


def json_string(source: Source, emit: Emit) -> Scan[None]:
    """Read a string, its quotes included, as `json_value` does."""
    if (yield from source.next()) != '"':
        raise Malformed
    emit(source.take(1))
    while True:
        char = yield from source.next()
        if char == '"':
            emit(source.take(1))
            return
        if char == "\\":
            yield from _escape(source, emit)
        elif plain := _PLAIN.match(source.text, source.pos):
            emit(source.take(plain.end() - source.pos))
        else:
            emit(escape_control(source.take(1)))


def _escape(source: Source, emit: Emit) -> Scan[None]:
    kind = (yield from source.ahead(2))[1]
    if kind == "u":
        digits = (yield from source.ahead(6))[2:]
        if not _HEX.fullmatch(digits):
            raise Malformed
        emit(source.take(6))
    elif kind in '"\\/bfnrt':
        emit(source.take(2))
    else:
        raise Malformed


def _word(source: Source, emit: Emit, word: str) -> Scan[None]:
    if not (yield from source.accept(word)):
        if source.ended and word.startswith(source.text[source.pos :]):
            raise CutShort
        raise Malformed
    emit(word)


def _number(source: Source, emit: Emit) -> Scan[None]:
    """Read a number and emit it whole: only its end tells whether it is one."""
    number = yield from peek_run(source, _NUMBER_CHARS, _MAX_NUMBER)
    if not _NUMBER.fullmatch(number):
        raise Malformed
    emit(source.take(len(number)))


def peek_run(source: Source, chars: re.Pattern[str], limit: int) -> Scan[str]:
    """Return the run of `chars` (one class, repeated) that comes next, unread.

    Raises Malformed beyond `limit`, CutShort if the text may end inside of it."""
    while True:
        match = chars.match(source.text, source.pos)
        end = match.end() if match else source.pos
        if end - source.pos > limit:
            raise Malformed
        if end < len(source.text):
            return source.text[source.pos : end]
        if source.ended:
            raise CutShort
        yield


def whole(scan: Callable[[Source, Emit], Scan[None]], text: str) -> str | None:
    """Return the output of `scan` for a complete text, or None if it does not read exactly that."""
    source = Source()
    # A number ends where something else begins.
    source.feed(text + "\n")
    source.ended = True
    pieces: list[str] = []
    try:
        for _ in scan(source, pieces.append):
            return None
    except (Malformed, CutShort):
        return None
    return None if source.text[source.pos :].strip() else "".join(pieces)
