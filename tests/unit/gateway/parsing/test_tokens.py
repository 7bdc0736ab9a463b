"""Control tokens that a parser must see, and those that stay hidden."""

from __future__ import annotations

import json

import pytest

from catenary.text import Vocabulary
from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import Content, Part, ToolCallStart
from gateway.parsing.toolset import ToolSet
from tests.support.tiny_tokenizer import IM_END_ID, byte_ids, tokenizer_json

CALL, CALL_END = 5, 6
ANSWER = [*byte_ids("Hm. "), CALL, *byte_ids('{"name": "now", "arguments": {}}'), CALL_END, IM_END_ID]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """The tiny tokenizer, where the tags of calls are control tokens."""
    model = tokenizer_json()
    for token in model["added_tokens"]:
        token["special"] = token["special"] or "tool_call" in token["content"]
    return Vocabulary(json.dumps(model).encode(), sha256="")


def answered(vocabulary: Vocabulary, choice: ParserChoice) -> list[Part]:
    """What an answer says, with the tokens shown that the choice asks for."""
    shown = vocabulary.special_named(choice.markers)
    detokenizer = vocabulary.detokenizer([], shown=shown)
    parser = choice.parser("")
    parts = [part for token_id in ANSWER for part in parser.feed(detokenizer.push(token_id))]
    return [*parts, *parser.finish()]


def test_markers_that_are_control_tokens_are_seen(vocabulary: Vocabulary) -> None:
    choice = ParserChoice("hermes", "qwen3", ToolSet({"now": {}}))
    assert vocabulary.special_named(choice.markers) == {CALL, CALL_END}
    parts = answered(vocabulary, choice)
    assert [part.name for part in parts if isinstance(part, ToolCallStart)] == ["now"]
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "Hm."


def test_others_stay_hidden(vocabulary: Vocabulary) -> None:
    choice = ParserChoice("", "qwen3")
    assert vocabulary.special_named(choice.markers) == frozenset()
    text = "".join(part.text for part in answered(vocabulary, choice) if isinstance(part, Content))
    assert text == 'Hm. {"name": "now", "arguments": {}}'
