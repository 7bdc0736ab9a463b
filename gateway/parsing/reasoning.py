"""Reasoning in front of an answer, by the names that vLLM gave the parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from gateway.parsing.markers import MarkerSet
from gateway.parsing.output import Output
from gateway.parsing.source import Scan, Source

_MAX_SPACE = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around a model's thoughts; the first of each is what templates write."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]


class Beginning(Enum):
    """What an answer begins in, as the prompt's end tells."""

    THOUGHTS = "thoughts"
    """The template opened the reasoning."""
    ANSWER = "answer"
    """The template closed it: the model was told not to think."""
    UNKNOWN = "unknown"
    """The model opens it, or not."""


_THINK = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",))
_GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))

HARMONY = "gptoss"

REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": _THINK,
        "qwen3": _THINK,
        "glm45": _THINK,
        # vLLM's names for models that think in the same tags.
        "deepseek_v3": _THINK,
        "kimi_k2": _THINK,
        "granite": _GRANITE,
        "mistral": _MISTRAL,
    }
)
"""Reasoning formats by the parsers' names."""


def beginning(form: ReasoningFormat, tail: str, *, continues: bool) -> Beginning:
    """What the answer to a prompt that ends with `tail` begins in.

    A marker counts at the very end, where only a template can have written it. With `continues`, where the
    prompt ends inside of the assistant's message, the last one that there is counts."""
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


def read_reasoning(
    source: Source, output: Output, form: ReasoningFormat, start: Beginning, interrupts: tuple[str, ...]
) -> Scan[bool]:
    """Read thoughts to their end, or to one of `interrupts`, which is not read.

    White space around them belongs to the markers. Returns whether there were any."""
    if start is Beginning.ANSWER or (start is Beginning.UNKNOWN and not (yield from _opens(source, form))):
        return False
    output.open_span(0)
    closing = MarkerSet((*form.closes, *interrupts))
    found = yield from closing.seek(source, output.reasoning, trim=True)
    if found is None:
        return True
    if found.marker in form.closes:
        source.take(len(found.marker))
    output.close_span(source.taken)
    return True


def _opens(source: Source, form: ReasoningFormat) -> Scan[bool]:
    """Read the opening marker, if the answer begins with one."""
    while True:
        ahead = source.text[source.pos :]
        space = len(ahead) - len(ahead.lstrip())
        if space > _MAX_SPACE:
            return False
        here = ahead[space:]
        for marker in form.opens:
            if here.startswith(marker):
                source.take(space + len(marker))
                return True
        if source.ended or not any(marker.startswith(here) for marker in form.opens):
            return False
        yield
