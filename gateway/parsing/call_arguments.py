"""Readers of one call's name and arguments: a JSON object, or a notation that is converted to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from gateway.parsing.formats import TaggedArguments
from gateway.parsing.json_text import json_string, json_value, peek_run, whole
from gateway.parsing.output import Output
from gateway.parsing.python_text import python_value
from gateway.parsing.source import MAX_DRAFT, CutShort, Emit, Malformed, MarkerSet, Scan, Source
from gateway.parsing.toolset import ToolSet, is_text, to_json

# Characters of a field's name in an object that is a call: an object with a longer one is not.
_MAX_WORD = 256
_ARGUMENTS = frozenset({"arguments", "parameters"})


class CallReader:
    """Reader of calls from a source into an output."""

    def __init__(self, source: Source, output: Output, tools: ToolSet) -> None:
        self.source = source
        self.output = output
        self.tools = tools
        self.known_only = False
        """Whether only functions that exist are called, as where calls have no marker."""
        self.markers: tuple[str, ...] = ()
        """Texts that may begin a call."""
        self.drafts = False
        """Whether all text stays held until the end of the call decides that it is one."""

    def begin(self, name: str, written_id: str = "") -> None:
        """Begin a call: the text read for it is no longer content. Raises Malformed for a bad name."""
        if not self.tools.accepts(name, known=self.known_only):
            raise Malformed
        if not self.drafts:
            self.source.release()
        self.output.start(name, written_id)

    def hold_again(self) -> None:
        """Hold the text behind a call, which may be another one."""
        if not self.drafts:
            self.source.hold("")

    def json_arguments(self, name: str, written_id: str = "", ends: tuple[str, ...] = ()) -> Scan[None]:
        """Stream a JSON object. One of `ends`, which is not read, stands for an empty one."""
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
        """Return whether one of these comes next, or `ahead` characters further on, unread."""
        for literal in literals:
            if (yield from self.source.matching(literal, ahead)):
                return True
        return False

    def comes(self, literal: str) -> Scan[bool]:
        """Return whether `literal` comes next behind white space, unread. Raises CutShort if cut inside."""
        yield from self.source.skip_space()
        if (yield from self.source.matching(literal)):
            return True
        self.check_cut((literal,))
        return False

    def check_cut(self, literals: tuple[str, ...]) -> None:
        """Raise CutShort if the text ends in the middle of one of these, which comes next."""
        source = self.source
        rest = source.text[source.pos :]
        if source.ended and rest and any(literal.startswith(rest) for literal in literals):
            raise CutShort

    def call_list(self, name_key: str = "name") -> Scan[None]:
        yield from self.listed(lambda: self.call_object(name_key=name_key))

    def listed(self, call: Callable[[], Scan[None]]) -> Scan[None]:
        """Read calls in brackets with commas between them; `call` reads one."""
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
        """Read the comma behind an item, unless `end` comes, which is not read. Raises Malformed."""
        char = yield from self.source.skip_space()
        if char == ",":
            self.source.take(1)
        elif char != end:
            raise Malformed

    def call_object(self, *, needs_arguments: bool = False, name_key: str = "name") -> Scan[None]:
        """Read `{"name": ..., "arguments": {...}}`, keys in any order; the name is under `name_key`."""
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
                # The name may follow, and arguments other than objects are converted as a whole.
                pieces: list[str] = []
                yield from json_value(source, pieces.append)
                held = "".join(pieces)
            else:
                yield from json_value(source, nowhere)
            if begun and (yield from source.skip_space()) not in ",}":
                # The call was emitted: a missing brace does no harm.
                return
            yield from self.comma("}")
        source.take(1)
        if not begun:
            self._late(name, held, needs_arguments)

    def _late(self, name: str, held: str, needs_arguments: bool) -> None:
        """Emit the call of an object that is complete already."""
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
        pieces: list[str] = []
        yield from json_string(self.source, pieces.append)
        text = "".join(pieces)
        if len(text) > _MAX_WORD:
            raise Malformed
        return str(json.loads(text))


def _sendable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 does not have, as JSON's escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def nowhere(text: str) -> None:
    """Drop a value that is not needed."""


_NAME_CHARS = re.compile(r"[\w.-]*")
_KEY_CHARS = re.compile(r"\w*")
_NO_KEY = re.compile(r"[<>\n]")
# Of a parameter's name and of the blanks around it: text with a longer one is not a call.
_MAX_NAME = 256
_MAX_BLANK = 64
"""Most white space between two tags."""


class PythonReader(CallReader):
    """Reader of `[f(a=1, b="x"), g()]`."""

    def python_calls(self, until: str = "") -> Scan[None]:
        """Read the list, or calls without brackets and commas up to the text `until`. Arguments must be
        named: no schema says what a position means.

        A call is emitted once it has ended: anything but a literal inside makes all of it text."""
        if not until:
            yield from self.listed(self._python_call)
            return
        while not (yield from self.comes(until)):
            yield from self._python_call()
            self.hold_again()

    def _python_call(self) -> Scan[None]:
        source, output, drafts = self.source, self.output, self.drafts
        if (yield from source.skip_space()) == "{":
            yield from self.call_object(needs_arguments=True)
            return
        if drafts:
            yield from self._python_arguments()
            return
        self.drafts = True
        source.hold_on(MAX_DRAFT)
        output.draft()
        try:
            yield from self._python_arguments()
        except Malformed:
            output.discard()
            raise
        finally:
            self.drafts = False
            output.keep()
        source.release()

    def _python_arguments(self) -> Scan[None]:
        source = self.source
        name = yield from peek_run(source, _NAME_CHARS, _MAX_NAME)
        source.take(len(name))
        if (yield from source.skip_space()) != "(":
            raise Malformed
        source.take(1)
        self.begin(name)
        yield from self._keywords()
        self.output.complete()

    def _keywords(self) -> Scan[None]:
        source, emit = self.source, self.output.arguments
        emit("{")
        given: set[str] = set()
        while (yield from source.skip_space()) != ")":
            key = yield from peek_run(source, _KEY_CHARS, _MAX_NAME)
            if not key or key in given:
                raise Malformed
            source.take(len(key))
            if (yield from source.skip_space()) != "=":
                raise Malformed
            source.take(1)
            emit((", " if given else "") + json.dumps(key) + ": ")
            yield from python_value(source, emit)
            given.add(key)
            yield from self.comma(")")
        source.take(1)
        emit("}")


class TaggedReader(CallReader):
    """Reader of calls with a tag for each parameter. Types come from the tool's schema.

    A value may contain any text, even tags of the format. It ends at a closing tag at the end of the text,
    before the next parameter or the call's end, or as the last of its line. If it began on a line of its own,
    tags within its lines are text. Without a closing tag it ends before a call's whole end and, if values
    have no opening tag, before a parameter that the function has and that was not given yet."""

    def tagged_arguments(self, name: str, tags: TaggedArguments) -> Scan[None]:
        """Read all parameters of a call of `name`, until neither a parameter nor an end comes."""
        emit = self.output.arguments
        key = yield from self._tag(tags)
        if not key and not (yield from self.at(tags.ends)):
            self.check_cut(tags.ends)
            raise Malformed
        self.begin(name)
        lead, given = "{", set[str]()
        while key:
            # A repeated one would make two members of one name.
            show: Emit = nowhere if key in given else emit
            given.add(key)
            show(lead + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._tag_value(name, key, tags, given, show)
            lead = ", "
            key = yield from self._tag(tags)
        emit("{}" if lead == "{" else "}")
        self.output.complete()

    def _tag(self, tags: TaggedArguments) -> Scan[str]:
        """Read the next parameter's name; empty if none comes. Raises CutShort if the text ends in it."""
        source = self.source
        yield from source.skip_space()
        key = yield from self._key_ahead(tags, 0)
        if key is None:
            raise CutShort
        if key:
            source.take(len(tags.key_open) + len(key) + len(tags.key_close))
        return key.strip()

    def _key_ahead(self, tags: TaggedArguments, at: int) -> Scan[str | None]:
        """Return the name in the tag `at` characters further on, unread, with the white space around it;
        empty if there is no tag, None if the text ends before that is certain."""
        source = self.source
        if not (yield from source.matching(tags.key_open, at)):
            rest = source.text[source.pos + at :]
            return None if rest and source.ended and tags.key_open.startswith(rest) else ""
        at += len(tags.key_open)
        while True:
            rest = source.text[source.pos + at : source.pos + at + _MAX_NAME + len(tags.key_close)]
            if (end := rest.find(tags.key_close)) >= 0:
                key = rest[:end]
                return "" if _NO_KEY.search(key) or not key.strip() else key
            odd = _NO_KEY.search(rest)
            if len(rest) > _MAX_NAME or (odd and not tags.key_close.startswith(rest[odd.start() :])):
                return ""
            if source.ended:
                return None
            yield

    def _tag_value(
        self, name: str, key: str, tags: TaggedArguments, given: Collection[str], emit: Emit
    ) -> Scan[None]:
        source = self.source
        if tags.value_open:
            yield from source.skip_space()
            if not (yield from source.accept(tags.value_open)):
                if source.ended and tags.value_open.startswith(source.text[source.pos :]):
                    raise CutShort
                # The parameter had no value. The text in its place is content.
                emit("null")
                return
        padded = tags.padded and (yield from source.accept("\n"))
        types = self.tools.types(name, key)
        pieces: list[str] = []
        last: list[str] = []
        if is_text(types):
            emit('"')
        now = _escaped(emit) if is_text(types) else pieces.append

        def show(text: str) -> None:
            # Text held back at the end may be half of a tag.
            (last.append if source.ended else now)(text)

        ends = MarkerSet((tags.value_close, tags.key_open, *tags.ends))
        begin = source.taken
        while (found := (yield from ends.seek(source, show))) is not None:
            apart = not padded or found.space.endswith("\n") or source.taken == begin
            if (yield from self._ends_value(found.marker, name, tags, given, apart=apart)):
                break
            show(found.space + source.take(len(found.marker)))
        else:
            raise CutShort
        now("".join(last))
        space = found.space[:-1] if tags.padded and found.space.endswith("\n") else found.space
        if is_text(types):
            emit(json.dumps(space)[1:])
        else:
            emit(to_json("".join(pieces) + space, types))
        if found.marker == tags.value_close:
            source.take(len(found.marker))

    def _ends_value(
        self, marker: str, name: str, tags: TaggedArguments, given: Collection[str], *, apart: bool
    ) -> Scan[bool]:
        """Return whether a value ends at the marker that comes next. `apart`: it begins a line, or the value
        did not begin on one of its own."""
        source = self.source
        if marker != tags.value_close:
            if not apart:
                return False
            if marker == tags.key_open:
                return (yield from self._new_parameter(name, tags, given, 0))
            return (yield from self._call_ends(tags, 0))
        blank = yield from source.blank(len(marker), _MAX_BLANK)
        behind = len(marker) + len(blank)
        if self._text_ends(behind):
            return True
        if apart:
            return "\n" in blank or (yield from self.at((tags.key_open, *tags.ends), behind))
        return "\n" in blank and (
            (yield from self._new_parameter(name, tags, given, behind))
            or (yield from self._call_ends(tags, behind))
        )

    def _new_parameter(self, name: str, tags: TaggedArguments, given: Collection[str], at: int) -> Scan[bool]:
        """Return whether an existing parameter that was not given yet comes `at` characters ahead."""
        if tags.value_open:
            return False
        key = yield from self._key_ahead(tags, at)
        if not key or key.strip() in given or not self.tools.knows(name, key.strip()):
            return False
        at += len(tags.key_open) + len(key) + len(tags.key_close)
        return not tags.padded or "\n" in (yield from self.source.blank(at, _MAX_BLANK))

    def _call_ends(self, tags: TaggedArguments, at: int) -> Scan[bool]:
        """Return whether the end of the call comes `at` characters ahead, followed by the end of the text or
        by more of the call's format."""
        for place, end in enumerate(tags.ends):
            if (yield from self.source.matching(end, at)):
                at += len(end)
                at += len((yield from self.source.blank(at, _MAX_BLANK)))
                # Values with an opening tag have a closing one too: without it, only the text's end tells.
                more = () if tags.value_open else (*tags.ends[place + 1 :], *self.markers)
                return self._text_ends(at) or (yield from self.at(more, at))
        return False

    def _text_ends(self, at: int) -> bool:
        source = self.source
        return source.ended and source.pos + at >= len(source.text)


def read_until(source: Source, literals: tuple[str, ...]) -> Scan[str]:
    """Read a short text up to one of `literals`, which is not read, and strip it.

    Raises Malformed, CutShort."""
    yield from source.skip_space()
    pieces: list[str] = []
    length = 0

    def add(text: str) -> None:
        nonlocal length
        length += len(text)
        if length > _MAX_NAME:
            raise Malformed
        pieces.append(text)

    if (yield from MarkerSet(literals).seek(source, add)) is None:
        raise CutShort
    return "".join(pieces)


def _escaped(emit: Emit) -> Emit:
    return lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1])
