"""Events of a model's text: content up to stop strings, reasoning, and calls with ids."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from catenary.text import StopScanner
from gateway.parsing.source import Source


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a call. `index` counts the calls of a choice from 0; `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. The texts of a whole call, joined, are a JSON object. Never empty."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Parser of one choice's text.

    The joined parts of a kind do not depend on how the text was cut. Nothing raises: text that only looks
    like a call is content."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that this text makes certain, in order."""
        ...

    def finish(self) -> list[Part]:
        """Return the remaining parts. The parser must not be used again."""
        ...


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop string that ended an answer. Positions count the characters of the whole text, as it was parsed.

    text: the string; shown: where the text that is shown ends; end: the position behind the string."""

    text: str
    shown: int
    end: int


class ContentStops:
    """Search for stop strings in content as a parser finds it.

    Content that is divided by reasoning, a call or a marker is two texts: no stop string begins in one and
    ends in the other."""

    __slots__ = ("_end", "_include", "_scanner", "begin", "found")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """Make a search for `stops`, none of them empty; `include`: the stop string is content too."""
        self._scanner = StopScanner(stops)
        self._include = include
        self._end = 0
        self.begin = 0
        """Position before which no stop string is looked for."""
        self.found: Stop | None = None

    def read(self, text: str, end: int) -> str:
        """Take content that ends at the position `end`; return the part of it and of held text to show."""
        if self.found is not None:
            return ""
        start = end - len(text)
        before = self.flush() if start != self._end else ""
        self._end = end
        if start < self.begin:
            free = text[: self.begin - start]
            before += self.flush() + free
            text = text[len(free) :]
        held = self._scanner.held
        scan = self._scanner.feed(text)
        if (matched := scan.matched) is None:
            return before + scan.text
        shown = end - len(text) - held + len(scan.text)
        behind = shown + len(matched)
        self.found = Stop(matched, behind if self._include else shown, behind)
        return before + scan.text + (matched if self._include else "")

    def flush(self) -> str:
        """Return the content held back, where it ends."""
        return self._scanner.flush()

    def settled(self, place: int) -> int:
        """Return how much of the text in front of `place` no stop string can cut away any more."""
        return min(place, self._end - self._scanner.held) if self._scanner.held else place


_ALPHABET = string.ascii_letters + string.digits


class IdStyle(Enum):
    """Style of call ids: a model's template may ask for a certain form."""

    CALL = "call"
    """`call_` and 24 random characters."""
    NINE = "nine"
    """Nine letters and digits, as Mistral's templates demand."""
    OWN = "own"
    """Id as the model wrote it, `functions.NAME:3`, as Kimi's template shows it again. The number counts the
    calls of a conversation, and continues from there where the model wrote one that is taken."""

    def make(self, name: str, written: str, used: Collection[str]) -> str:
        """Return an id for a call of `name`; `written`: by the model; `used`: ids of the other calls of the
        conversation."""
        if self is IdStyle.OWN:
            number = len(used)
            while not written or written in used:
                written = f"functions.{name}:{number}"
                number += 1
            return written
        if self is IdStyle.NINE:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return "call_" + secrets.token_hex(12)


class Output:
    """Collector of parts, which numbers the calls and records where the reasoning was."""

    def __init__(
        self,
        source: Source,
        *,
        ids: IdStyle = IdStyle.CALL,
        single: bool = False,
        thoughts: bool = True,
        contents: bool = True,
        taken: Collection[str] = (),
        stops: ContentStops | None = None,
    ) -> None:
        """Collect parts of the text that comes from `source`.

        Args:
            source: text being read.
            ids: style of call ids.
            single: drop calls behind the first one.
            thoughts: show reasoning.
            contents: show content.
            taken: ids of the calls before this answer.
            stops: stop strings of content; nothing behind one is part of the answer.
        """
        self._source = source
        self._style = ids
        self._ids = set(taken)
        self._single = single
        self._thoughts = thoughts
        self._contents = contents
        self._stops = stops
        self._parts: list[Part] = []
        # State before a draft: parts, numbers of calls and of complete ones, ids.
        self._before: tuple[list[Part], int, int, set[str]] | None = None
        self._texts: list[str] = []
        self._kind: type[Content] | type[Reasoning] | None = None
        self.calls = 0
        self.complete_calls = 0
        """Calls read to their end."""
        self.spans: list[tuple[int, int | None]] = []
        """Spans of reasoning, markers included: characters from, to (None: still open)."""

    @property
    def stop(self) -> Stop | None:
        return None if self._stops is None else self._stops.found

    @property
    def settled(self) -> int:
        """Characters of the text that are certain to be part of the answer."""
        settled = self._source.settled
        return settled if self._stops is None else self._stops.settled(settled)

    def search_from(self, place: int) -> None:
        """Look for stop strings only from this character of the text on."""
        if self._stops is not None:
            self._stops.begin = place

    def content(self, text: str, end: int | None = None) -> None:
        """Add content, which ends with the last character that was read, or else in front of `end`."""
        if not self._contents:
            return
        if self._stops is not None:
            text = self._stops.read(text, self._source.taken if end is None else end)
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        if self._thoughts and self._goes_on():
            self._add(Reasoning, text)

    def start(self, name: str, written_id: str = "") -> None:
        if not self._goes_on():
            return
        self._flush()
        self.calls += 1
        if not self._muted:
            call_id = self._style.make(name, written_id, self._ids)
            self._ids.add(call_id)
            self._parts.append(ToolCallStart(self.calls - 1, call_id, name))

    def arguments(self, text: str) -> None:
        if text and not self._muted and self.stop is None:
            if self._kind is not None:
                self._flush()
            self._texts.append(text)

    def complete(self) -> None:
        """Note that the call that began last has all its arguments."""
        if self.stop is None:
            self.complete_calls += 1

    def draft(self) -> None:
        """Hold back further parts until `keep` or `discard`."""
        self._flush()
        self._before = self._parts, self.calls, self.complete_calls, set(self._ids)
        self._parts = []

    def keep(self) -> None:
        if self._before is not None:
            self._flush()
            self._parts = self._before[0] + self._parts
            self._before = None

    def discard(self) -> None:
        if self._before is not None:
            self._parts, self.calls, self.complete_calls, self._ids = self._before
            self._texts, self._kind, self._before = [], None, None

    def open_span(self, at: int) -> None:
        self.spans.append((at, None))

    def close_span(self, at: int) -> None:
        """Close the span of reasoning, if one is open."""
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1] = (self.spans[-1][0], at)

    def finish(self) -> None:
        """Flush content that might have begun a stop string."""
        if self._stops is not None:
            self._add(Content, self._stops.flush())

    def drain(self) -> list[Part]:
        self._flush()
        if self._before is not None:
            parts = self._before[0].copy()
            self._before[0].clear()
            return parts
        parts, self._parts = self._parts, []
        return parts

    def _goes_on(self) -> bool:
        """Return whether calls and reasoning still belong to the answer. Content before them ends here."""
        if self._stops is None:
            return True
        self._add(Content, self._stops.flush())
        return self._stops.found is None

    @property
    def _muted(self) -> bool:
        return self._single and self.calls > 1

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._texts.append(text)

    def _flush(self) -> None:
        """Join pending texts into one part; texts without a kind are arguments of the last call."""
        if self._texts:
            text = "".join(self._texts)
            self._parts.append(self._kind(text) if self._kind else ToolCallArguments(self.calls - 1, text))
            self._texts = []
        self._kind = None
