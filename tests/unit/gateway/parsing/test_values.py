"""Values of arguments that have a tag each: any text, tags of the format too, ends where the format says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing.choice import ParserChoice
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import read_with

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
}
TOOLS = ToolSet({"f": SCHEMA})
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
# GLM 4.7 writes it on one line.
SHORT = GLM.replace("\n", "")


def called(parser: str, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Content and calls, which do not depend on how the text is cut. A name stands once in an object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    choice = ParserChoice(parser, "", TOOLS)
    content, _, calls = whole = read_with(choice, "", [text])
    assert read_with(choice, "", list(text)) == whole
    assert read_with(choice, "", [text[at : at + 5] for at in range(0, len(text), 5)]) == whole
    return content, [(name, json.loads(arguments, object_pairs_hook=once)) for name, arguments in calls]


@pytest.mark.parametrize(
    "value",
    [
        "def f():\n  return '</function>'",
        "use <parameter=y> here",
        "use <parameter=n> here",
        "a<parameter=",
        "<parameter=n>9",
        "<parameter=y>\n9",
        "</tool_call> in text",
        "say </parameter> twice: </parameter>.",
        "</parameter> at first",
        "<function=f><parameter=n>1</parameter></function>",
        "line\n</parameter> is a tag\nmore",
        "line\n</function>\nmore",
        "line\n</tool_call>\nmore",
        "<tool_call>\n<function=g>\nno",
        "<parameter=z>1</parameter>\nnext",
        "</tool_call>",
        "",
        " \n spaces \n\n",
        "\n",
    ],
)
def test_values_on_lines_of_their_own(value: str) -> None:
    assert called("qwen3_coder", QWEN % value) == ("", [("f", {"x": value, "n": 3})])


@pytest.mark.parametrize("form", [GLM, SHORT])
@pytest.mark.parametrize(
    "value",
    [
        "use <arg_key> tag",
        "</tool_call> in text",
        "</tool_call>",
        "<arg_key>k</arg_key>",
        "<arg_key>n</arg_key>",
        "<arg_key>k</arg_key>\n<arg_value>1",
        "<arg_value>",
        "say </arg_value> twice: </arg_value>.",
        "a</arg_value>",
        "<tool_call>f\n",
        "",
        " \n spaces \n\n",
    ],
)
def test_values_between_tags(form: str, value: str) -> None:
    assert called("glm45", form % value) == ("", [("f", {"x": value, "n": 3})])


_QWEN_PIECES = [
    "<parameter=n>",
    "<parameter=y>",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "<function=f>",
]
_GLM_PIECES = ["<arg_key>n</arg_key>", "<arg_key>", "</tool_call>", "<tool_call>f", "<arg_value>", "\n"]


@given(st.lists(st.sampled_from([*_QWEN_PIECES, " ", "a", "\nb"]), max_size=12).map("".join))
def test_tags_within_lines_are_text(value: str) -> None:
    assert called("qwen3_coder", QWEN % ("a" + value)) == ("", [("f", {"x": "a" + value, "n": 3})])


@given(st.lists(st.sampled_from([*_GLM_PIECES, "</arg_value>.", " ", "a"]), max_size=12).map("".join))
def test_tags_in_a_value_that_is_closed_are_text(value: str) -> None:
    for form in (GLM, SHORT):
        assert called("glm45", form % value) == ("", [("f", {"x": value, "n": 3})])


_LINE = "\n<parameter=%s>\n%s\n</parameter>"


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        # On one line.
        ("<parameter=x>a</parameter><parameter=n>3</parameter></function>", {"x": "a", "n": 3}, ""),
        ("<parameter=x>a </parameter> b</parameter></function>", {"x": "a </parameter> b"}, ""),
        ("<parameter=x>a<parameter=y></parameter></function>", {"x": "a<parameter=y>"}, ""),
        # The line's end before the closing tag is missing.
        (
            "\n<parameter=x>\na</parameter>\n<parameter=n>\n3</parameter>\n</function>",
            {"x": "a", "n": 3},
            "",
        ),
        # The closing tag is.
        ("\n<parameter=x>\na\n<parameter=n>\n3\n</function>\n</tool_call>", {"x": "a", "n": 3}, ""),
        ("\n<parameter=x>\na" + _LINE % ("y", "3") + "\n</function>", {"x": "a\n<parameter=y>\n3"}, ""),
        ("\n<parameter=x>\na\n</function>", {"x": "a"}, ""),
        ("\n<parameter=x>\na\n</tool_call>", {"x": "a"}, ""),
        # The end of the call is. A closing tag alone on a line ends a value in any case.
        (_LINE % ("x", "a") + "\nSo be it.", {"x": "a"}, "So be it."),
        (_LINE % ("x", "a") + "\n</tool_call> Done", {"x": "a"}, "Done"),
        # A parameter that is given twice, one that the function does not have, and a name that is none.
        (_LINE % ("n", "3") + _LINE % ("n", "4") + "\n</function>", {"n": 3}, ""),
        (_LINE % ("x", "a") + _LINE % ("y", "b") + "\n</function>", {"x": "a", "y": "b"}, ""),
        (_LINE % ("x", "a") + "\n<parameter=a\nb>\n", {"x": "a"}, "<parameter=a\nb>\n"),
    ],
)
def test_tags_that_are_not_as_they_should_be(text: str, arguments: dict[str, Any], content: str) -> None:
    assert called("qwen3_coder", "<function=f>" + text) == (content, [("f", arguments)])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("\n<arg_key>x</arg_key>\n</tool_call>", {"x": None}),
        ("\n<arg_key> x </arg_key><arg_value>a</arg_value>\n</tool_call>", {"x": "a"}),
        ("\n<arg_key>x</arg_key><arg_value>a</arg_value></tool_call>", {"x": "a"}),
        ("\n<arg_key>x</arg_key>\n<arg_value>a</arg_value>\n", {"x": "a"}),
    ],
)
def test_tags_of_glm_that_are_not_as_they_should_be(text: str, arguments: dict[str, Any]) -> None:
    assert called("glm45", "<tool_call>f" + text + "<tool_call>f</tool_call>")[1] == [
        ("f", arguments),
        ("f", {}),
    ]


def test_a_value_of_glm_without_its_closing_tag_ends_with_the_text() -> None:
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>a</tool_call>"
    assert called("glm45", text) == ("", [("f", {"x": "a"})])


@pytest.mark.parametrize(("parser", "text"), [("qwen3_coder", QWEN % "ab"), ("glm45", GLM % "ab")])
def test_a_call_that_is_cut_is_not_closed(parser: str, text: str) -> None:
    """Its arguments are the beginning of the whole ones, never others."""
    whole = read_with(ParserChoice(parser, "", TOOLS), "", [text])[2][0][1]
    for cut in range(len(text)):
        _, _, calls = read_with(ParserChoice(parser, "", TOOLS), "", [text[:cut]])
        for _, arguments in calls:
            assert whole.startswith(arguments)
