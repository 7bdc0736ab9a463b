"""Reasoning in front of an answer, by the names that vLLM gave the parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from gateway.parsing.calls import Calls
from gateway.parsing.output import Output
from gateway.parsing.source import MarkerSet, Scan, Source

# Blanks that may wait for the marker behind them.
_MAX_SPACE = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around a model's reasoning; the first of each is the one that templates write."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Texts that close the answer behind the reasoning, and are dropped."""


class Beginning(Enum):
    """State in which an answer begins, as the prompt's end shows."""

    THOUGHTS = "thoughts"
    """The template opened the reasoning."""
    ANSWER = "answer"
    """The template closed it: the model was told not to think."""
    UNKNOWN = "unknown"
    """The model may open it."""


_THINK = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",))
_GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))

_SEED = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",))
_HUNYUAN = ReasoningFormat("hy_v3", ("<think:opensource>",), ("</think:opensource>",))
_COHERE = ReasoningFormat("cohere_command3", ("<|START_THINKING|>",), ("<|END_THINKING|>",))
_APRIEL = ReasoningFormat(
    "apriel",
    ("Here are my reasoning steps:",),
    ("[BEGIN FINAL RESPONSE]",),
    after=("[END FINAL RESPONSE]",),
)

HARMONY = "gptoss"

REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": _THINK,
        "qwen3": _THINK,
        "glm45": _THINK,
        # vLLM's names for models that think in the same tags.
        "deepseek_v3": _THINK,
        "deepseek_v4": _THINK,
        "glm47": _THINK,
        "holo2": _THINK,
        "kimi_k2": _THINK,
        "mimo": _THINK,
        "minimax_m2": _THINK,
        "nemotron_v3": _THINK,
        "olmo3": _THINK,
        "poolside_v1": _THINK,
        "step3": _THINK,
        "step3p5": _THINK,
        "apriel": _APRIEL,
        "cohere_command3": _COHERE,
        "hy_v3": _HUNYUAN,
        "granite": _GRANITE,
        "mistral": _MISTRAL,
        "seed_oss": _SEED,
    }
)


def beginning(form: ReasoningFormat, tail: str, *, continues: bool) -> Beginning:
    """Return the state in which the answer to a prompt that ends with `tail` begins.

    A marker counts at the very end, where only a template can have written it. With `continues`, where the
    prompt ends inside of the assistant's message, the last marker counts."""
    end = tail.rstrip()
    if end.endswith(form.opens):
        return Beginning.THOUGHTS
    if end.endswith(form.closes):
        return Beginning.ANSWER
    if continues:
        opened = max(end.rfind(marker) for marker in form.opens)
        closed = max(end.rfind(marker) for marker in form.closes)
        return Beginning.THOUGHTS if opened > closed else Beginning.ANSWER
    return Beginning.UNKNOWN


class Thoughts:
    """Reader of the reasoning in front of an answer."""

    def __init__(self, source: Source, output: Output, form: ReasoningFormat, calls: Calls) -> None:
        """Make a reader. `calls` reads those that a model makes before its reasoning has ended."""
        self._source = source
        self._output = output
        self._form = form
        self._calls = calls
        self._spoken = False
        self._lead = ""

    def read(self, start: Beginning, interrupts: tuple[str, ...]) -> Scan[bool]:
        """Read reasoning to its end, or to one of `interrupts`, which is not read.

        A whole call of a function that exists is a call, with more reasoning behind it; its marker alone is
        text. White space around them belongs to the markers. Return whether there was any reasoning."""
        source, output, form = self._source, self._output, self._form
        if start is Beginning.ANSWER or (start is Beginning.UNKNOWN and not (yield from self._opens())):
            return False
        output.open_span(0)
        drafted = () if interrupts else self._calls.markers
        closing = MarkerSet((*form.closes, *interrupts, *drafted))
        trim = True
        while (found := (yield from closing.seek(source, self._emit, trim=trim))) is not None:
            if found.marker not in drafted:
                if found.marker in form.closes:
                    source.take(len(found.marker))
                output.close_span(source.taken)
                return True
            begin = source.taken
            trim = yield from self._calls.draft(found.marker)
            if trim:
                output.close_span(begin)
                output.open_span(source.taken)
                self._lead = "\n" if self._spoken else ""
            else:
                self._emit(found.space + found.marker)
        return True

    def _emit(self, text: str) -> None:
        """Emit reasoning; behind a call it begins on a line of its own."""
        self._output.reasoning(self._lead + text)
        self._lead, self._spoken = "", True

    def _opens(self) -> Scan[bool]:
        """Read the opening marker, if the answer begins with one."""
        source, opens = self._source, self._form.opens
        while True:
            ahead = source.text[source.pos :]
            space = len(ahead) - len(ahead.lstrip())
            if space > _MAX_SPACE:
                return False
            here = ahead[space:]
            for marker in opens:
                if here.startswith(marker):
                    source.take(space + len(marker))
                    return True
            if source.ended or not any(marker.startswith(here) for marker in opens):
                return False
            yield
