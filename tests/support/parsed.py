"""Outputs of models for tests of the parsers: tools, calls, and reading a text to what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import Content, Reasoning, ToolCallArguments, ToolCallStart
from gateway.parsing.toolset import ToolSet

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "hourly": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"type": "string"}},
        "address": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]},
        "price": {"type": "number"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "comment": {},
    },
    "$defs": {"Address": {"type": "object", "properties": {"zip": {"type": "string"}}}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CODE: dict[str, Any] = {"type": "object", "properties": {"source": {"type": "string"}}}
SCHEMAS = {"get_weather": WEATHER, "place_order": ORDER, "now": NOTHING, "run_code": CODE}


@dataclass(frozen=True)
class Call:
    """A call: its name and its arguments, as a value."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Output:
    """A text and what it says. `tail`: the prompt's end."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    thinks: str = ""
    tail: str = "<|im_start|>assistant\n"


PARIS = Call("get_weather", {"city": "Paris"})
ROME = Call("get_weather", {"city": "Rome", "days": 3})
P, R = '{"city": "Paris"}', '{"city": "Rome", "days": 3}'


Read = tuple[str, str, list[tuple[str, str]]]


def read(output: Output, pieces: Sequence[str]) -> Read:
    """Content, reasoning, and the calls' names and arguments."""
    return read_with(ParserChoice(output.parser, output.thinks, ToolSet(SCHEMAS)), output.tail, pieces)


def read_with(choice: ParserChoice, tail: str, pieces: Sequence[str]) -> Read:
    """The same with a given parser."""
    parser = choice.parser(tail)
    calls: list[Any] = []
    content, reasoning, ids = "", "", set()
    for parts in [*map(parser.feed, pieces), parser.finish()]:
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case ToolCallStart(index, call_id, name):
                    assert index == len(calls)
                    assert call_id not in ids
                    ids.add(call_id)
                    calls.append((name, ""))
                case ToolCallArguments(index, text):
                    assert index == len(calls) - 1
                    assert text
                    calls[index] = (calls[index][0], calls[index][1] + text)
    return content, reasoning, calls
