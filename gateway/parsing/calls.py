"""Reader of running text with calls in it, by the format of a family of models."""

from __future__ import annotations

from gateway.parsing.call_arguments import PythonReader, TaggedReader, read_until
from gateway.parsing.formats import (
    Branch,
    CallList,
    CallObject,
    CallSequence,
    JsonArguments,
    Literal,
    PythonCalls,
    Repeated,
    Step,
    Steps,
    TaggedArguments,
    ToolFormat,
    Word,
    WordKind,
)
from gateway.parsing.output import Output
from gateway.parsing.source import MAX_DRAFT, CutShort, Malformed, MarkerSet, Scan, Source
from gateway.parsing.toolset import ToolSet

_ID_PREFIX = "functions."


class Calls(PythonReader, TaggedReader):
    """Scanner of one answer, or of the text behind its reasoning."""

    def __init__(self, source: Source, output: Output, tools: ToolSet, form: ToolFormat) -> None:
        super().__init__(source, output, tools)
        self._form = form
        self.markers = tuple(form.calls)
        self._markers = MarkerSet(form.markers)
        self._name = ""
        self._id = ""
        self._to_draft = MAX_DRAFT

    def read(self, *, trim: bool) -> Scan[None]:
        """Read to the end of the text. `trim`: drop white space at the start, as behind reasoning."""
        if self._form.bare:
            trim = yield from self._bare(trim=trim)
        while True:
            found = yield from self._markers.seek(self.source, self.output.content, trim=trim)
            if found is None:
                return
            self.source.take(len(found.marker))
            trim = True
            if found.marker in self._form.calls:
                steps = self._form.calls[found.marker]
                trim = yield from self._attempt(steps, found.space + found.marker)

    def _bare(self, *, trim: bool) -> Scan[bool]:
        """Read an answer that begins with an unmarked call. Return whether white space behind is dropped."""
        space: list[str] = []
        while (char := (yield from self.source.peek())).isspace():
            space.append(self.source.take(1))
        before = "" if trim else "".join(space)
        if char not in self._form.bare or not char or (yield from self.at(self.markers)):
            self.output.content(before)
            return trim
        self.known_only = True
        trim = yield from self._attempt(self._form.bare[char], before)
        self.known_only = False
        return trim

    def _attempt(self, steps: Steps, before: str) -> Scan[bool]:
        """Read a call; text that only looked like one is content. Return whether it was one."""
        calls = self.output.calls
        self.source.hold(before)
        self._name = self._id = ""
        try:
            yield from self._steps(steps)
        except Malformed:
            self.output.content(self.source.release())
            return False
        except CutShort:
            held = self.source.release()
            rest = self.source.take(len(self.source.text) - self.source.pos)
            # A list that is cut behind a call has its separator, or the beginning of the next call, there.
            listed = self.output.calls > calls
            self.output.content(held + rest if held.strip() and not listed else "")
            return True
        held = self.source.release()
        if self.output.calls == calls:
            self.output.content(held)
            return False
        return True

    def draft(self, marker: str) -> Scan[bool]:
        """Read a call of a function that exists, from its marker (one of `markers`) to its end.

        Return whether there is one; else only the marker was read. For text where the marker may be just a
        word."""
        source = self.source
        if self._to_draft <= 0:
            source.take(len(marker))
            return False
        source.hold("", MAX_DRAFT)
        self.output.draft()
        calls = self.output.calls
        self.drafts = self.known_only = True
        self._name = self._id = ""
        try:
            source.take(len(marker))
            yield from self._steps(self._form.calls[marker])
            found = self.output.calls > calls
        except Malformed:
            found = False
        except CutShort:
            # The cut may be in the text behind it.
            found = self.output.calls > calls and self.output.complete_calls == self.output.calls
            if found:
                source.take(len(source.text) - source.pos)
        self.drafts = self.known_only = False
        held = source.release()
        if found:
            self.output.keep()
        else:
            self.output.discard()
            source.unread(held[len(marker) :])
            # Rereading is bounded.
            self._to_draft -= len(held)
        return found

    def _steps(self, steps: Steps) -> Scan[None]:
        for step in steps:
            yield from self._step(step)

    def _step(self, step: Step) -> Scan[None]:
        match step:
            case Literal():
                yield from self._literal(step)
            case Word():
                yield from self._word(step)
            case JsonArguments():
                yield from self.json_arguments(self._name, self._id, step.ends)
            case TaggedArguments():
                yield from self.tagged_arguments(self._name, step)
            case CallObject():
                yield from self.call_object()
            case CallList():
                yield from self.call_list(step.name)
            case CallSequence():
                yield from self._sequence(step)
            case PythonCalls():
                yield from self.python_calls(step.until)
            case Repeated():
                yield from self._repeated(step)
            case Branch():
                char = yield from self.source.skip_space()
                yield from self._steps(step.steps.get(char, step.steps.get("", ())))

    def _literal(self, literal: Literal) -> Scan[None]:
        source = self.source
        yield from source.skip_space()
        if (yield from source.accept(literal.text)):
            return
        self.check_cut((literal.text,))
        if not literal.optional:
            raise Malformed

    def _word(self, word: Word) -> Scan[None]:
        text = yield from read_until(self.source, word.until)
        if word.kind is WordKind.NAME:
            self._name = text
        elif word.kind is WordKind.ID:
            # `functions.NAME:3`
            self._id = text
            self._name = text.removeprefix(_ID_PREFIX).partition(":")[0]

    def _repeated(self, repeated: Repeated) -> Scan[None]:
        yield from self._steps(repeated.steps)
        while (yield from self.comes(repeated.again)):
            self.hold_again()
            yield from self._steps(repeated.steps)

    def _sequence(self, sequence: CallSequence) -> Scan[None]:
        while True:
            yield from self.call_object(needs_arguments=not sequence.bare)
            yield from self.source.skip_space()
            for separator in sequence.separators:
                yield from self.source.accept(separator)
            self.hold_again()
            if (yield from self.source.skip_space()) != "{":
                return
