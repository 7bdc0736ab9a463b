"""What a model's text is made of: the one event model of all parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a function begins. `index` counts the calls of a choice from 0; `id` is unique."""

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
    """Reads one choice's text.

    What all parts of a kind add up to does not depend on how the text was cut. Nothing raises: text that
    only looks like a call is content."""

    def feed(self, text: str) -> list[Part]:
        """Parts that this text makes certain, in order."""
        ...

    def finish(self) -> list[Part]:
        """The rest, once nothing follows. The parser must not be used again."""
        ...
