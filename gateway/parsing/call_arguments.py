"""Arguments that are not JSON, turned into it as they come."""

from __future__ import annotations

import json
import re

from gateway.parsing.call_objects import CallReader
from gateway.parsing.json_text import peek_run
from gateway.parsing.markers import MarkerSet
from gateway.parsing.python_text import python_value
from gateway.parsing.schema_types import is_text, to_json
from gateway.parsing.source import CutShort, Emit, Malformed, Scan, Source
from gateway.parsing.syntax import TaggedArguments

_NAME_CHARS = re.compile(r"[\w.-]*")
_KEY_CHARS = re.compile(r"\w*")
_MAX_NAME = 256


class PythonReader(CallReader):
    """`[f(a=1, b="x"), g()]`."""

    def python_calls(self) -> Scan[None]:
        """The list. Arguments have names: what a position means, no schema says."""
        yield from self.listed(self._python_call)

    def _python_call(self) -> Scan[None]:
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
        lead = ""
        while (yield from source.skip_space()) != ")":
            key = yield from peek_run(source, _KEY_CHARS, _MAX_NAME)
            if not key:
                raise Malformed
            source.take(len(key))
            if (yield from source.skip_space()) != "=":
                raise Malformed
            source.take(1)
            emit(lead + json.dumps(key) + ": ")
            yield from python_value(source, emit)
            lead = ", "
            yield from self.comma(")")
        source.take(1)
        emit("}")


class TaggedReader(CallReader):
    """A tag for each parameter. Types come from the tool's schema."""

    def tagged_arguments(self, name: str, tags: TaggedArguments) -> Scan[None]:
        """All parameters of a call of `name`. Where neither a parameter nor an end comes, they end too."""
        emit = self.output.arguments
        ends = MarkerSet((tags.value_close, tags.key_open, *tags.ends))
        key = yield from self._tag(tags)
        if not key and not (yield from self.at(tags.ends)):
            raise Malformed
        self.begin(name)
        lead = "{"
        while key:
            emit(lead + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._tag_value(name, key, tags, ends)
            lead = ", "
            key = yield from self._tag(tags)
        emit("{}" if lead == "{" else "}")
        self.output.complete()

    def _tag(self, tags: TaggedArguments) -> Scan[str]:
        """The next parameter's name; empty if none comes."""
        source = self.source
        yield from source.skip_space()
        if not (yield from source.accept(tags.key_open)):
            return ""
        key = yield from read_until(source, (tags.key_close,))
        yield from source.accept(tags.key_close)
        return key

    def _tag_value(self, name: str, key: str, tags: TaggedArguments, ends: MarkerSet) -> Scan[None]:
        source, emit = self.source, self.output.arguments
        if tags.value_open:
            yield from source.skip_space()
            if not (yield from source.accept(tags.value_open)):
                # It had no value. What comes instead is content.
                emit("null")
                return
        if tags.padded:
            yield from source.accept("\n")
        types = self.tools.types(name, key)
        pieces: list[str] = []
        if is_text(types):
            emit('"')
        found = yield from ends.seek(source, _escaped(emit) if is_text(types) else pieces.append)
        if found is None:
            raise CutShort
        space = found.space[:-1] if tags.padded and found.space.endswith("\n") else found.space
        if is_text(types):
            emit(json.dumps(space)[1:])
        else:
            emit(to_json("".join(pieces) + space, types))
        if found.marker == tags.value_close:
            source.take(len(found.marker))


def read_until(source: Source, literals: tuple[str, ...]) -> Scan[str]:
    """A short text up to one of `literals`, which is not read, without white space around it.

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
