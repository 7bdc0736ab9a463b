"""Reader of OpenAI's harmony format (gpt-oss): messages with channels.

An answer is `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a
call's header has `to=functions.NAME`, and its message is the arguments."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.parsing.call_arguments import CallReader
from gateway.parsing.output import Output
from gateway.parsing.source import CutShort, Emit, Malformed, MarkerSet, Scan, Source
from gateway.parsing.toolset import ToolSet

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

ANSWER = f"{CHANNEL}final{MESSAGE}"
"""Header of the final answer."""

# Characters between a channel's marker and its message: recipient and type, in the format's documentation.
_MAX_HEADER = 512
_FUNCTIONS = "functions."
_ROLE = "assistant"
_HEADER = MarkerSet((MESSAGE, START, *_ENDS))
_NEXT = MarkerSet((START, CHANNEL, *_ENDS))


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message: its recipient and its channel."""

    channel: str
    recipient: str

    @classmethod
    def of(cls, text: str) -> Header:
        """Read the text between `<|start|>` and `<|message|>`."""
        words = text.replace(CONSTRAIN, " ").replace(CHANNEL, f" {CHANNEL}").split()
        channel = next((word.removeprefix(CHANNEL) for word in words if word.startswith(CHANNEL)), "")
        recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
        return cls(channel, recipient)

    @property
    def function(self) -> str:
        """Name of the called function, else empty."""
        return self.recipient[len(_FUNCTIONS) :] if self.recipient.startswith(_FUNCTIONS) else ""

    @property
    def is_thought(self) -> bool:
        """Whether it is analysis, or goes to a tool that is no function of the request."""
        return self.channel == "analysis" or bool(self.recipient)


def begins_inside(tail: str) -> bool:
    """Return whether a prompt that ends with `tail` ends inside of a message."""
    return MESSAGE in tail.rpartition(START)[2]


class Harmony(CallReader):
    """Scanner of one answer."""

    def __init__(self, source: Source, output: Output, tools: ToolSet, *, calls: bool) -> None:
        """Make a scanner. `calls`: whether functions may be called."""
        super().__init__(source, output, tools)
        self._calls = calls
        self._spoken: set[bool] = set()

    def read(self, tail: str) -> Scan[None]:
        """Read to the end of the text. `tail`: the prompt's end, in whose last header it begins."""
        header, message, _ = tail.rpartition(START)[2].partition(MESSAGE)
        if message and START in tail:
            yield from self._message(Header.of(header), 0)
        else:
            yield from self._headed(header if START in tail else "", "")
        while (yield from self._goes_on()):
            started = yield from self.source.accept(START)
            yield from self._headed("", START if started else "")

    def _goes_on(self) -> Scan[bool]:
        """Read the ends of messages up to the next header; return False at the end of the text."""
        source = self.source
        try:
            while (yield from source.skip_space()):
                for end in _ENDS:
                    if (yield from source.accept(end)):
                        break
                else:
                    return True
        except CutShort:
            pass
        return False

    def _headed(self, begun: str, before: str) -> Scan[None]:
        """Read a header and its message. `begun`: the header's start in the prompt; `before`: its marker,
        which some models leave out behind another message."""
        since = self.source.taken
        self.source.hold(before, _MAX_HEADER + len(MESSAGE))
        try:
            text = yield from self._header()
        except (Malformed, CutShort) as failure:
            # A header that was cut is dropped; text without one is an answer.
            held = self.source.release()
            cut = isinstance(failure, CutShort) and before == START
            if CHANNEL not in held and not cut:
                self.output.content(held.removeprefix(START))
                yield from _NEXT.seek(self.source, self.output.content)
            return
        lead, channel, _ = text.partition(CHANNEL)
        if channel and not before and CHANNEL not in begun and _is_text(lead):
            self.source.release()
            self.output.content(lead.rstrip(), since + len(lead.rstrip()))
            self.source.hold("")
        self.source.hold_on()
        yield from self._message(Header.of(begun + text), since)

    def _header(self) -> Scan[str]:
        pieces: list[str] = []
        found = yield from _HEADER.seek(self.source, pieces.append)
        if found is None:
            raise CutShort
        if found.marker != MESSAGE:
            raise Malformed
        self.source.take(len(found.marker))
        return "".join(pieces)

    def _message(self, header: Header, since: int) -> Scan[None]:
        """Read the message behind a header that began at character `since`."""
        if self._calls and (function := self._function(header)):
            try:
                yield from self._call(function)
            except Malformed:
                self.output.content(self.source.release())
            except CutShort:
                held = self.source.release()
                rest = self.source.take(len(self.source.text) - self.source.pos)
                self.output.content(held + rest if held else "")
            return
        self.source.release()
        emit: Emit = self.output.reasoning if header.is_thought else self.output.content
        if header.is_thought:
            self.output.open_span(since)
        if header.is_thought in self._spoken:
            emit("\n")
        self._spoken.add(header.is_thought)
        if (found := (yield from _NEXT.seek(self.source, emit))) is not None:
            if found.marker in _ENDS:
                self.source.take(len(found.marker))
            self.output.close_span(self.source.taken)

    def _function(self, header: Header) -> str:
        """Return the name of the called function, else empty. One that exists needs no namespace."""
        known = header.recipient in self.tools.schemas
        return header.function or (header.recipient if known else "")

    def _call(self, name: str) -> Scan[None]:
        """Read the arguments, possibly in a fence. A message without text has none."""
        yield from self.source.skip_space()
        fenced = yield from self.source.accept("```json")
        yield from self.json_arguments(name, ends=_ENDS)
        if fenced and (yield from self.comes("```")):
            self.source.take(len("```"))


def _is_text(lead: str) -> bool:
    """Return whether there is more in front of a header's channel than a header has there."""
    words = lead.replace(CONSTRAIN, " ").split()
    return any(word != _ROLE and not word.startswith("to=") for word in words)
