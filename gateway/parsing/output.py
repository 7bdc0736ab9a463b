"""Parts as scanners make them, joined as far as they are of one kind."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from enum import Enum

from gateway.parsing.events import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

_ALPHABET = string.ascii_letters + string.digits


class IdStyle(Enum):
    """What ids of calls look like: a model's template may ask for a certain form."""

    CALL = "call"
    """`call_` and 24 random characters."""
    NINE = "nine"
    """Nine letters and digits, as Mistral's templates demand."""
    OWN = "own"
    """What the model wrote, `functions.NAME:3`, as Kimi's template shows it again. The number counts the
    calls of a conversation; it goes on from there where the model wrote one that is taken."""

    def make(self, name: str, written: str, used: Collection[str]) -> str:
        """An id for a call of `name`; `written`: what the model wrote; `used`: ids of the other calls of the
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
    """Collects parts, numbers the calls, and remembers where the reasoning was."""

    def __init__(
        self,
        *,
        ids: IdStyle = IdStyle.CALL,
        single: bool = False,
        thoughts: bool = True,
        contents: bool = True,
        taken: Collection[str] = (),
    ) -> None:
        """`single`: calls behind the first one are left out; `thoughts`: reasoning is shown; `contents`:
        content is; `taken`: ids of the calls before this answer."""
        self._style = ids
        self._ids = set(taken)
        self._single = single
        self._thoughts = thoughts
        self._contents = contents
        self._parts: list[Part] = []
        self._texts: list[str] = []
        self._kind: type[Content] | type[Reasoning] | None = None
        self.calls = 0
        """Calls that began."""
        self.complete_calls = 0
        """Calls that were read to their end."""
        self.spans: list[tuple[int, int | None]] = []
        """Where the text is reasoning, markers included: characters from, to (None: it still is)."""

    def content(self, text: str) -> None:
        """Text for the reader."""
        if self._contents:
            self._add(Content, text)

    def reasoning(self, text: str) -> None:
        """Thoughts."""
        if self._thoughts:
            self._add(Reasoning, text)

    def start(self, name: str, written_id: str = "") -> None:
        """A call begins."""
        self._flush()
        self.calls += 1
        if not self._muted:
            call_id = self._style.make(name, written_id, self._ids)
            self._ids.add(call_id)
            self._parts.append(ToolCallStart(self.calls - 1, call_id, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text and not self._muted:
            if self._kind is not None:
                self._flush()
            self._texts.append(text)

    def complete(self) -> None:
        """The call that began last has all its arguments."""
        self.complete_calls += 1

    def open_span(self, at: int) -> None:
        """Reasoning begins."""
        self.spans.append((at, None))

    def close_span(self, at: int) -> None:
        """Reasoning has ended, if any had begun."""
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1] = (self.spans[-1][0], at)

    def drain(self) -> list[Part]:
        """The parts since the last call of it."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

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
        """Texts without a kind are arguments of the last call."""
        if self._texts:
            text = "".join(self._texts)
            self._parts.append(self._kind(text) if self._kind else ToolCallArguments(self.calls - 1, text))
            self._texts = []
        self._kind = None
