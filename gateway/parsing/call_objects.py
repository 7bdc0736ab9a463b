"""Calls as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.parsing.json_text import json_string, json_value, whole
from gateway.parsing.output import Output
from gateway.parsing.source import CutShort, Malformed, Scan, Source
from gateway.parsing.toolset import ToolSet

# Characters of a field's name in an object that is a call: what is longer is none.
_MAX_WORD = 256
_ARGUMENTS = frozenset({"arguments", "parameters"})


class CallReader:
    """Reads calls from a source, and gives them to an output."""

    def __init__(self, source: Source, output: Output, tools: ToolSet) -> None:
        self.source = source
        self.output = output
        self.tools = tools
        self.known_only = False
        """Only functions that exist are called, as where calls have no marker."""
        self.markers: tuple[str, ...] = ()
        """What a call may begin with."""
        self.drafts = False
        """All that is read stays held: it is a call only if it is one to its end."""

    def begin(self, name: str, written_id: str = "") -> None:
        """A call begins: what was read of it is content no longer. Raises Malformed for a bad name."""
        if not self.tools.accepts(name, known=self.known_only):
            raise Malformed
        if not self.drafts:
            self.source.release()
        self.output.start(name, written_id)

    def hold_again(self) -> None:
        """Behind a call, hold what may be another one."""
        if not self.drafts:
            self.source.hold("")

    def json_arguments(self, name: str, written_id: str = "", ends: tuple[str, ...] = ()) -> Scan[None]:
        """A JSON object, streamed. One of `ends`, which is not read, stands for an empty one."""
        if (yield from self.source.skip_space()) != "{":
            if not (yield from self.at(ends)):
                raise Malformed
            self.begin(name, written_id)
            self.output.arguments("{}")
            self.output.complete()
            return
        self.begin(name, written_id)
        yield from json_value(self.source, self.output.arguments)
        self.output.complete()

    def at(self, literals: tuple[str, ...], ahead: int = 0) -> Scan[bool]:
        """Whether one of these comes next, or `ahead` characters further on, unread."""
        for literal in literals:
            if (yield from self.source.matching(literal, ahead)):
                return True
        return False

    def comes(self, literal: str) -> Scan[bool]:
        """Whether `literal` comes next behind white space, unread. Raises CutShort if the text ends in it."""
        yield from self.source.skip_space()
        if (yield from self.source.matching(literal)):
            return True
        self.check_cut((literal,))
        return False

    def check_cut(self, literals: tuple[str, ...]) -> None:
        """Raises CutShort if the text ends in the middle of one of these, which comes next."""
        source = self.source
        rest = source.text[source.pos :]
        if source.ended and rest and any(literal.startswith(rest) for literal in literals):
            raise CutShort

    def call_list(self, name_key: str = "name") -> Scan[None]:
        """An array of call objects."""
        yield from self.listed(lambda: self.call_object(name_key=name_key))

    def listed(self, call: Callable[[], Scan[None]]) -> Scan[None]:
        """Calls in brackets with commas between them; `call` reads one."""
        source, calls = self.source, self.output.calls
        if not (yield from source.accept("[")):
            raise Malformed
        while (yield from source.skip_space()) != "]":
            yield from call()
            self.hold_again()
            yield from self.comma("]")
        source.take(1)
        if self.output.calls > calls and not self.drafts:
            source.release()

    def comma(self, end: str) -> Scan[None]:
        """What stands behind an item: a comma, or `end`, which is not read. Raises Malformed."""
        char = yield from self.source.skip_space()
        if char == ",":
            self.source.take(1)
        elif char != end:
            raise Malformed

    def call_object(self, *, needs_arguments: bool = False, name_key: str = "name") -> Scan[None]:
        """`{"name": ..., "arguments": {...}}`, its keys in any order; `name_key`: the name's."""
        source = self.source
        if (yield from source.skip_space()) != "{":
            raise Malformed
        source.take(1)
        name, held, begun = "", "", False
        while (yield from source.skip_space()) != "}":
            key = yield from self._key()
            char = yield from source.skip_space()
            if key == name_key and not name:
                name = yield from self._short_string()
            elif key in _ARGUMENTS and name and char == "{" and not (begun or held):
                begun = True
                yield from self.json_arguments(name)
            elif key in _ARGUMENTS and not (begun or held):
                # The name may follow, and arguments that are no object are looked at as a whole.
                pieces: list[str] = []
                yield from json_value(source, pieces.append)
                held = "".join(pieces)
            else:
                yield from json_value(source, nowhere)
            if begun and (yield from source.skip_space()) not in ",}":
                # The call is told: a brace that is missing breaks nothing.
                return
            yield from self.comma("}")
        source.take(1)
        if not begun:
            self._late(name, held, needs_arguments)

    def _late(self, name: str, held: str, needs_arguments: bool) -> None:
        """The call of an object that is complete already."""
        if needs_arguments and not held:
            raise Malformed
        if held.startswith('"'):
            # Arguments as JSON in a string, as the API itself has them.
            held = _sendable(json.loads(held)).strip()
        if held in ("", "null"):
            held = "{}"
        arguments = whole(json_value, held) if held.startswith("{") else None
        if arguments is None:
            raise Malformed
        self.begin(name)
        self.output.arguments(arguments)
        self.output.complete()

    def _key(self) -> Scan[str]:
        key = yield from self._short_string()
        if (yield from self.source.skip_space()) != ":":
            raise Malformed
        self.source.take(1)
        return key

    def _short_string(self) -> Scan[str]:
        """A short string's text."""
        pieces: list[str] = []
        yield from json_string(self.source, pieces.append)
        text = "".join(pieces)
        if len(text) > _MAX_WORD:
            raise Malformed
        return str(json.loads(text))


def _sendable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 does not have, as JSON's escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def nowhere(text: str) -> None:
    """Values that say nothing."""
