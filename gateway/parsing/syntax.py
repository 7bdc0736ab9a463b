"""The pieces that formats of tool calls are described with. They are data; calls.py reads text by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from gateway.parsing.output import IdStyle


@dataclass(frozen=True, slots=True)
class Literal:
    """A fixed text, with or without white space before it."""

    text: str
    optional: bool = False


class WordKind(Enum):
    """What a word says."""

    NAME = "name"
    """The function's name."""
    ID = "id"
    """An id like `functions.NAME:3`, which has the name in it."""
    OTHER = "other"
    """Nothing of interest."""


@dataclass(frozen=True, slots=True)
class Word:
    """Text up to one of `until`, which is not read."""

    kind: WordKind
    until: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments as a JSON object; the name came before. One of `ends` in its place: there are none."""

    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallObject:
    """`{"name": ..., "arguments": {...}}`, in any order, also with `parameters`, or without any."""


@dataclass(frozen=True, slots=True)
class CallList:
    """A JSON array of call objects, in which the function stands under the key `name`."""

    name: str = "name"


@dataclass(frozen=True, slots=True)
class CallSequence:
    """Call objects, one after the other, maybe with one of `separators` between them.

    `bare`: they may be without arguments."""

    separators: tuple[str, ...]
    bare: bool = False


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`[f(a=1), g()]`, where a call object may stand for a call.

    `until`: the calls stand without brackets and commas, up to this text, which is not read."""

    until: str = ""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """A tag for each parameter: `key_open` NAME `key_close` `value_open` VALUE `value_close`.

    A value ends at its closing tag or, if that is missing, where the next key or one of `ends` begins."""

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    ends: tuple[str, ...]
    padded: bool = False
    """A value stands on lines of its own: the newlines around it are not part of it."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Steps of one call, and once more for each `again` that comes next, white space aside."""

    steps: Steps
    again: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps by the character that comes next, white space aside; `""`: any other."""

    steps: Mapping[str, Steps]


Step: TypeAlias = (
    Literal
    | Word
    | JsonArguments
    | CallObject
    | CallList
    | CallSequence
    | PythonCalls
    | TaggedArguments
    | Repeated
    | Branch
)
Steps: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    name: str
    calls: Mapping[str, Steps] = field(default_factory=dict)
    """What stands behind each marker that begins a call."""
    frames: tuple[str, ...] = ()
    """Markers around calls that say nothing and are left out."""
    bare: Mapping[str, Steps] = field(default_factory=dict)
    """What an answer that begins with this character may be, without a marker."""
    ids: IdStyle = IdStyle.CALL
    ends_reasoning: bool = False
    """Its markers are tokens that no model writes in prose: one of them ends a reasoning left open."""
    parts: tuple[str, ...] = ()
    """Control tokens that are only a part of a marker, or end with white space."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to look for in running text."""
        return (*self.calls, *self.frames)

    @property
    def texts(self) -> frozenset[str]:
        """Everything fixed that it reads: markers, and what stands between and behind them."""
        steps = (*self.calls.values(), *self.bare.values())
        return frozenset((*self.markers, *self.parts)).union(*map(_texts, steps))


def _texts(steps: Steps) -> frozenset[str]:
    found: set[str] = set()
    for step in steps:
        match step:
            case Literal():
                found.add(step.text)
            case Word():
                found.update(step.until)
            case TaggedArguments():
                found.update((step.key_open, step.key_close, step.value_open, step.value_close, *step.ends))
            case PythonCalls():
                found.add(step.until)
            case Repeated():
                found.update(_texts(step.steps))
            case Branch():
                found.update(*map(_texts, step.steps.values()))
    return frozenset(found) - {""}
