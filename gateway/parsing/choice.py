"""Choice of the parser for a request's answers, and the driver that feeds text to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.parsing import formats, harmony, reasoning, response_template
from gateway.parsing.calls import Calls
from gateway.parsing.formats import FORMATS, ToolFormat
from gateway.parsing.output import ContentStops, IdStyle, Output, Part, Stop
from gateway.parsing.reasoning import REASONING, Beginning, ReasoningFormat, beginning
from gateway.parsing.response_template import TemplateFormats
from gateway.parsing.source import Scan, Source
from gateway.parsing.toolset import ToolSet


class TextParser:
    """Driver of a scanner: an `OutputParser`."""

    def __init__(self, source: Source, output: Output, scan: Scan[None]) -> None:
        """Make a parser whose `scan` reads `source` to its end into `output`."""
        self.source = source
        """The text, with how far it is read."""
        self._output = output
        self._scan = scan

    @property
    def stop(self) -> Stop | None:
        return self._output.stop

    @property
    def settled(self) -> int:
        """Characters of the text that no stop string can cut away any more."""
        return self._output.settled

    def search_from(self, place: int) -> None:
        """Look for stop strings only from this character of the text on."""
        self._output.search_from(place)

    @property
    def called(self) -> bool:
        return self._output.complete_calls > 0

    def reasoning_tokens(self, offsets: Sequence[int]) -> int:
        """Return how many of the tokens that begin at these characters (ascending) are reasoning."""
        count = 0
        for first, last in self._output.spans:
            end = len(offsets) if last is None else bisect_left(offsets, last)
            count += end - bisect_left(offsets, first)
        return count

    def feed(self, text: str) -> list[Part]:
        if text:
            self.source.feed(text)
            next(self._scan, None)
        return self._output.drain()

    def finish(self) -> list[Part]:
        self.source.ended = True
        next(self._scan, None)
        self._output.finish()
        return self._output.drain()


TOOL_PARSERS = frozenset({*FORMATS, formats.HARMONY})
REASONING_PARSERS = frozenset({*REASONING, reasoning.HARMONY, "openai_gptoss"})
_PLAIN = ToolFormat("")


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Parsers of a request's answers. Empty names: none of the kind."""

    tool_parser: str = ""
    """Name in TOOL_PARSERS, or `json`: calls as a constraint has them written."""
    reasoning_parser: str = ""
    tools: ToolSet = field(default_factory=ToolSet)
    continues: bool = False
    """Whether the answer goes on with the assistant's last message."""
    named: bool = False
    """Whether the request named the one function: its call ends the answer with `stop`, as OpenAI's do."""
    required: bool = False
    """Whether a constraint has the answer be calls alone: any other text is a part of a call that was cut."""
    legacy: bool = False
    """Whether the call is reported under its older names."""
    shows_reasoning: bool = True
    taken: frozenset[str] = frozenset()
    """Ids of the calls that the conversation has already."""
    template: TemplateFormats = field(default_factory=TemplateFormats)
    """Formats that the name `response_template` stands for."""

    @property
    def needed(self) -> bool:
        """Whether answers need a parser at all."""
        return bool(self.tool_parser or self.reasoning_parser)

    @property
    def called_reason(self) -> str:
        """Finish reason of an answer with a call."""
        if self.named:
            return "stop"
        return "function_call" if self.legacy else "tool_calls"

    @property
    def is_harmony(self) -> bool:
        """Whether the format is OpenAI's harmony."""
        return self.tool_parser == formats.HARMONY or self.reasoning_parser in (
            reasoning.HARMONY,
            "openai_gptoss",
        )

    @property
    def markers(self) -> frozenset[str]:
        """Texts of control tokens that the parser must see."""
        return frozenset(self._markers() if self.needed else ())

    def _markers(self) -> Iterator[str]:
        if self.is_harmony:
            yield from harmony.MARKERS
        if (form := self._thoughts) is not None:
            yield from (*form.opens, *form.closes, *form.after)
        yield from self._calls.texts

    @property
    def _thoughts(self) -> ReasoningFormat | None:
        if self.reasoning_parser == response_template.NAME:
            return self.template.reasoning
        return REASONING.get(self.reasoning_parser)

    @property
    def _calls(self) -> ToolFormat:
        if self.tool_parser == response_template.NAME:
            return self.template.tools or _PLAIN
        return (
            formats.JSON if self.tool_parser == formats.JSON.name else FORMATS.get(self.tool_parser, _PLAIN)
        )

    def thoughts_end(self, tail: str) -> str | None:
        """Return the text that ends the reasoning in which the answer begins, and behind which a constraint
        holds; None if it does not begin in reasoning, or no parser looks for it.

        In harmony that is the header of the answer's own channel; a call has a header of its own."""
        if self.is_harmony:
            return None if self.tool_parser or harmony.begins_inside(tail) else harmony.ANSWER
        form = self._thoughts
        if form is None or beginning(form, tail, continues=self.continues) is not Beginning.THOUGHTS:
            return None
        return form.closes[0]

    def parser(self, tail: str, stops: ContentStops | None = None) -> TextParser:
        """Return a parser for one choice. `tail`: the prompt's last characters; `stops`: for content."""
        source = Source()
        form = self._calls
        output = Output(
            source,
            ids=form.ids,
            single=self.tools.single,
            thoughts=self.shows_reasoning,
            contents=not self.required,
            taken=self.taken,
            stops=stops,
        )
        if self.is_harmony:
            reader = harmony.Harmony(source, output, self.tools, calls=bool(self.tool_parser))
            return TextParser(source, output, reader.read(tail))
        return TextParser(source, output, self._read(source, output, form, tail))

    def _read(self, source: Source, output: Output, form: ToolFormat, tail: str) -> Scan[None]:
        thoughts = self._thoughts
        if thoughts is not None:
            form = replace(form, frames=(*form.frames, *thoughts.after))
        calls = Calls(source, output, self.tools, form)
        trim = False
        if thoughts is not None:
            start = beginning(thoughts, tail, continues=self.continues)
            reader = reasoning.Thoughts(source, output, thoughts, calls)
            trim = yield from reader.read(start, form.markers if form.ends_reasoning else ())
        yield from calls.read(trim=trim)


def id_style(tool_parser: str) -> IdStyle:
    return FORMATS.get(tool_parser, _PLAIN).ids
