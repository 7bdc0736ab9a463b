"""Calls that a model makes before its thoughts have ended are calls; a marker that it names is a word."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.choice import ParserChoice
from gateway.parsing.source import MAX_DRAFT
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import PARIS, ROME, SCHEMAS, Call, Output, read

OPENED = "<|im_start|>assistant\n<think>\n"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
GLM_ROME = GLM.replace(
    "Paris</arg_value>", "Rome</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value>"
)
FORMATS = {"hermes": HERMES, "qwen3_coder": QWEN, "glm45": GLM}
BOTH = pytest.mark.parametrize("parser", FORMATS)


def check(output: Output) -> None:
    content, reasoning, calls = whole = read(output, [output.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call.name, call.arguments) for call in output.calls
    ]
    assert (content, reasoning) == (output.content, output.reasoning)
    assert read(output, list(output.text)) == whole
    pieces = [output.text[at : at + 7] for at in range(0, len(output.text), 7)]
    assert read(output, pieces) == whole


@BOTH
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("form", "content", "reasoning"),
    [
        ("Let me look.%s", "", "Let me look."),
        ("%s", "", ""),
        ("Let me look.\n\n%s\n", "", "Let me look."),
        ("Let me look.%s</think>", "", "Let me look."),
        ("Let me look.%s\n</think>\n\nIt is sunny.", "It is sunny.", "Let me look."),
        ("Let me look.\n%s\nThen more.\n</think>Yes.", "Yes.", "Let me look.\nThen more."),
        ("A <tool_call> is what I need.\n%s", "", "A <tool_call> is what I need."),
    ],
)
def test_a_call_before_the_end_of_thoughts(
    parser: str, opened: bool, form: str, content: str, reasoning: str
) -> None:
    text = form.replace("%s", FORMATS[parser])
    tail = OPENED if opened else "<|im_start|>assistant\n"
    check(Output(parser, text if opened else f"<think>{text}", content, (PARIS,), reasoning, "qwen3", tail))


@BOTH
@pytest.mark.parametrize(
    "prose",
    [
        "I could write <tool_call> here.",
        "I could write <tool_call>\nand </tool_call> around it.",
        '<tool_call>{"name": "get_weather", "arguments": {...}}</tool_call> is the form.',
        '<tool_call>{"name": "a function", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_moon", "arguments": {}}</tool_call> is none of mine.',
        "<tool_call>get_moon\n<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
        "<tool_call><function=get_moon><parameter=a>b</parameter></function></tool_call>",
        "<tool_call><tool_call><tool_call>",
    ],
)
def test_what_is_no_call_stays_a_thought(parser: str, prose: str) -> None:
    check(Output(parser, prose + "</think>Done.", "Done.", (), prose, "qwen3", OPENED))
    check(Output(parser, prose, "", (), prose, "qwen3", OPENED))
    after = f"{prose}</think>\n{FORMATS[parser]}"
    check(Output(parser, after, "", (PARIS,), prose, "qwen3", OPENED))


@BOTH
def test_a_call_that_is_cut_in_the_thoughts_stays_one(parser: str) -> None:
    """It is not known to be a call before its end: nothing of it is told as one."""
    call = FORMATS[parser]
    complete = read(Output(parser, call, thinks="qwen3", tail=OPENED), [call])[2]
    for cut in range(len(call)):
        output = Output(parser, call[:cut], thinks="qwen3", tail=OPENED)
        content, reasoning, calls = read(output, [call[:cut]])
        assert content == ""
        assert calls in ([], complete)
        assert reasoning.strip() == ("" if calls else call[:cut].strip())
        assert read(output, list(call[:cut])) == (content, reasoning, calls)


def test_several_calls_in_thoughts() -> None:
    check(Output("glm45", f"A{GLM}\n{GLM_ROME}</think>", "", (PARIS, ROME), "A", "glm45", OPENED))
    check(Output("glm45", f"A{GLM}</think>{GLM_ROME}", "", (PARIS, ROME), "A", "glm45", OPENED))
    text = 'A functools[{"name": "now", "arguments": {}}, {"name": "now"}] B'
    check(
        Output("phi4_mini_json", text, "", (Call("now", {}), Call("now", {})), "A\nB", "deepseek_r1", OPENED)
    )
    # The second one of a list is broken: it was none.
    text = 'A functools[{"name": "now", "arguments": {}}, oh] B'
    check(Output("phi4_mini_json", text, "", (), text, "deepseek_r1", OPENED))


def test_tokens_of_calls_are_no_reasoning() -> None:
    parser = ParserChoice("glm45", "glm45", ToolSet(SCHEMAS)).parser(OPENED)
    text = f"Hm.{GLM}So.</think>Yes."
    parser.feed(text)
    parser.finish()
    assert parser.reasoning_tokens(range(len(text))) == len("Hm.So.</think>")


def test_long_calls_and_hostile_thoughts() -> None:
    """A long call is one; what only begins like calls is read again only so often."""
    source = "x" * (MAX_DRAFT // 2)
    call = '<tool_call>{"name": "run_code", "arguments": {"source": "%s"}}</tool_call>'
    check(Output("hermes", call % source, "", (Call("run_code", {"source": source}),), "", "qwen3", OPENED))
    nested = "<tool_call>run_code<arg_key>source</arg_key><arg_value>" * 10_000
    output = Output("glm45", nested, thinks="glm45", tail=OPENED)
    assert read(output, [nested]) == ("", nested, [])
