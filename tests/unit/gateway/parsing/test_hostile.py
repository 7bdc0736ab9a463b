"""Text that was made to hurt a parser costs no more than other text: its calls are counted, by character."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.parsing.choice import REASONING_PARSERS, TOOL_PARSERS, ParserChoice
from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.parsing.source import Scan, Source
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import SCHEMAS
from tests.support.steps import counted

CALLS_PER_CHARACTER = 50
"""More than any parser makes; one that goes back over what it has read makes thousands."""
VANISHES = ("openai", "qwen3_coder", "glm45", "seed_oss")

_BAR = "\uff5c"
OPENERS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "functools",
    "qwen3_coder": "<tool_call>\n<function=run_code>\n<parameter=",
    "glm45": "<tool_call>run_code\n<arg_key>",
    "seed_oss": "<seed:tool_call>\n<function=run_code>\n<parameter=",
    "deepseek_v3": f"<{_BAR}tool\u2581call\u2581begin{_BAR}>",
    "deepseek_v31": f"<{_BAR}tool\u2581call\u2581begin{_BAR}>now<{_BAR}tool\u2581sep{_BAR}>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
    "openai": "<|channel|>commentary to=functions.now<|message|>",
}
BODIES = {
    "calls in calls": "[" + "a(b=" * 1250,
    "brackets": "[" * 5000,
    "braces": '{"a":' * 1000,
    "quotes": '{"name": "' + '\\"' * 2500,
    "spaces": " \n" * 2500,
    "angles": "<" * 5000,
    "tags": "<tool_call" * 500,
    "digits": '{"name": "now", "arguments": {"a": ' + "1" * 5000,
    "held": '{"arguments": {"a": "' + "x" * 5000,
    "openers": "<tool_call><function=" * 250,
    "thoughts": "<think>" * 700,
}


def parsed(name: str, pieces: list[str], thinks: str = "") -> list[Part]:
    parser = ParserChoice(name, thinks, ToolSet(SCHEMAS)).parser("<|start|>assistant")
    return [part for parts in [*map(parser.feed, pieces), parser.finish()] for part in parts]


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS | {"json"}))
@pytest.mark.advisory("GHSA-j828-28rj-hfhp")
def test_hostile_text_costs_little(name: str) -> None:
    for label, body in BODIES.items():
        for text in (body, OPENERS.get(name, "") + body, '[{"name": "now", "arguments": ' + body):
            parts, calls = counted(partial(parsed, name, [text]))
            assert calls < CALLS_PER_CHARACTER * len(text), label
            # Nothing vanishes but what is a call, its frame or white space.
            assert parts or name in VANISHES or not text.strip()
            # Nothing is made up: what is told stands in the text in this order, and calls are of functions.
            told = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
            left = iter(text)
            assert all(char in left for char in told), label
            names = {part.name for part in parts if isinstance(part, ToolCallStart)}
            assert names <= SCHEMAS.keys(), label


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "openai"])
def test_little_is_left_unread(name: str) -> None:
    """With each piece what was not read before is copied, so that is bounded, whatever the text holds."""
    for body in BODIES.values():
        parser = ParserChoice(name, "qwen3", ToolSet(SCHEMAS)).parser("")
        for char in OPENERS.get(name, "") + body[:3000]:
            parser.feed(char)
            assert len(parser.source.text) - parser.source.pos <= 512
        parser.finish()


class _Counted(str):
    """A text that counts the characters that are copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        self.copied += len(found)
        return found


def test_white_space_does_not_copy_what_follows_it() -> None:
    source = Source()
    text = _Counted(" x" * 5000 + "\n\u2003\x1f x")
    source.text = text
    for _ in range(5001):
        assert next_of(source.skip_space()) == "x"
        source.take(1)
    assert text.copied < 4 * len(text)


def next_of(scan: Scan[str]) -> str:
    """What a scan that needs no more text returns."""
    try:
        next(scan)
    except StopIteration as end:
        return str(end.value)
    raise AssertionError("it waits for more text")


@pytest.mark.parametrize("thinks", sorted(REASONING_PARSERS))
def test_hostile_thoughts_cost_little(thinks: str) -> None:
    for body in ("<think>" * 3000, "</think" * 3000, " " * 20_000, "Here is my " * 2000, "[THINK" * 3000):
        parts, calls = counted(partial(parsed, "", [body, body], thinks))
        assert calls < CALLS_PER_CHARACTER * 2 * len(body)
        assert {type(part) for part in parts} <= {Content, Reasoning}
        told = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
        left = iter(body + body)
        assert all(char in left for char in told)
        assert told or not body.strip()


@pytest.mark.advisory("CVE-2025-9141")
def test_text_of_a_call_is_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "pwned"
    evil = f"__import__('os').system('touch {trap}')"
    texts = {
        "qwen3_coder": f"<function=place_order><parameter=items>{evil}</parameter></function></tool_call>",
        "glm45": f"<tool_call>place_order<arg_key>price</arg_key><arg_value>{evil}</arg_value></tool_call>",
        "pythonic": f"[place_order(items=[{evil}])]",
    }
    for name, text in texts.items():
        parts = parsed(name, [text])
        assert any(isinstance(part, Content | ToolCallArguments) for part in parts)
    assert not trap.exists()


def test_nesting_is_limited() -> None:
    text = '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 100_000 + "1" + "}" * 100_000 + "}"
    parts = parsed("hermes", [text])
    assert [part.name for part in parts if isinstance(part, ToolCallStart)] == ["now"]
    arguments = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    assert arguments == '{"a": ' * 64
    deep = "<tool_call><function=place_order><parameter=items>" + "[" * 100_000 + "</parameter></function>"
    assert any(isinstance(part, ToolCallArguments) for part in parsed("qwen3_coder", [deep]))


def test_arguments_in_a_string_stay_sendable() -> None:
    text = r'<tool_call>{"name": "now", "arguments": "{\"zone\": \"\ud800\"}"}</tool_call>'
    arguments = "".join(part.text for part in parsed("hermes", [text]) if isinstance(part, ToolCallArguments))
    assert arguments.encode() == rb'{"zone": "\ud800"}'


def test_a_call_held_too_long_is_content() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 70_000 + '"}, "name": "now"}'
    parts = parsed("hermes", [text])
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text
