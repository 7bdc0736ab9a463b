"""What an answer says does not depend on how it was cut, long texts without a header or a call included."""

from __future__ import annotations

import pytest

from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import Content, Part, ToolCallArguments
from gateway.parsing.source import MAX_HELD
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import SCHEMAS

WORDS = "word, " * 300
TEXTS = {
    "without a header": WORDS,
    "ends": WORDS + "  <|end|><|start|>assistant<|channel|>final<|message|>more",
    "spaces": " " * 5000,
    "channels": "<|channel|>" * 500 + "x",
    "a space where the header is too long": "x" * 523 + " y",
    "a space behind that": "x" * 524 + " y",
    "a long header": "<|channel|>" + "final " * 200 + "<|message|>text",
    "long arguments": "<|channel|>commentary to=functions.now<|message|>"
    + '{"a": "'
    + "x" * 2000
    + '"}<|call|>',
}


def shown(name: str, text: str, size: int) -> list[tuple[type[Part], str]]:
    """The parts of a text that comes in pieces of `size` characters, neighbours of one kind joined."""
    parser = ParserChoice(name, "", ToolSet(SCHEMAS)).parser("<|start|>assistant")
    parts = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])]
    found: list[tuple[type[Part], str]] = []
    for part in [*parts, *parser.finish()]:
        said = part.text if isinstance(part, Content | ToolCallArguments) else ""
        if found and found[-1][0] is type(part):
            said = found.pop()[1] + said
        found.append((type(part), said))
    return found


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_harmony_answer_in_pieces(text: str) -> None:
    whole = shown("openai", text, len(text))
    for size in (1, 7, 600):
        assert shown("openai", text, size) == whole


@pytest.mark.parametrize("text", [WORDS.strip(), "x" * 523 + " y", "x" * 524 + " y"])
def test_a_harmony_answer_without_a_header_is_shown_as_it_is(text: str) -> None:
    assert shown("openai", text, 3) == [(Content, text)]


def test_a_call_that_holds_too_much_in_pieces() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD + '  <tool_call>{"name": "now"}</tool_call>'
    assert shown("hermes", text, 97) == shown("hermes", text, len(text))
