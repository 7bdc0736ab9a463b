"""Declarative response templates, in the manner of transformers' own, as formats of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from catenary.text import TokenizerTraits
from gateway.generation.chat import choose_parser
from gateway.parsing.choice import ParserChoice
from gateway.parsing.response_template import NAME as RESPONSE_TEMPLATE
from gateway.parsing.response_template import read_response_template
from gateway.parsing.toolset import ToolSet
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from tests.support.model_outputs import HERMES, MISTRAL, PYTHONIC, QWEN_CODER
from tests.support.parsed import SCHEMAS, Output, read_with
from tests.support.token_outputs import GLM

FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close_pattern": r"\s*(?:<\|im_end\|>|<eos>)", "content": "text"}
TEMPLATES: dict[str, tuple[dict[str, Any], list[Output]]] = {
    "objects": (
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": FUNCTION,
        },
        HERMES,
    ),
    "named": (
        {"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)", "content": "json", "transform": NAMED},
        [output for output in MISTRAL if "CALLS]get" in output.text and "[ARGS]" not in output.text],
    ),
    "tags": (
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
        [output for output in QWEN_CODER if output.text.startswith("<tool_call>\n")],
    ),
    "pairs of tags": (
        {
            "open_pattern": r"<tool_call>(?P<name>[^<\n]+)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
            "transform": NAMED,
        },
        GLM,
    ),
    "python": (
        {"open": "<|python_start|>", "close": "<|python_end|>", "content": "python-call-list"},
        [output for output in PYTHONIC if "_start|>[" in output.text],
    ),
}


def template(calls: dict[str, Any] | None, **fields: Any) -> str:
    regions = {"reasoning_content": THINK, "content": CONTENT, **fields}
    return json.dumps({"start_anchor": "x", "fields": regions | ({"tool_calls": calls} if calls else {})})


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_what_the_parser_of_its_family_reads(name: str) -> None:
    calls, outputs = TEMPLATES[name]
    formats = read_response_template(template(calls))
    assert formats is not None
    assert outputs
    for output in outputs:
        thinks = RESPONSE_TEMPLATE if output.thinks in ("qwen3", "glm45") else output.thinks
        choice = ParserChoice(RESPONSE_TEMPLATE, thinks, ToolSet(SCHEMAS), template=formats)
        own = ParserChoice(output.parser, output.thinks, ToolSet(SCHEMAS))
        for pieces in ([output.text], list(output.text)):
            assert read_with(choice, output.tail, pieces) == read_with(own, output.tail, pieces)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]",
        "{}",
        '{"fields": 1}',
        '{"fields": {"tool_calls": 1}}',
        template({"open_pattern": "(a+)+b", "content": "json", "transform": FUNCTION}),
        template(
            {
                "open_pattern": r"call:(?P<name>\w+)",
                "content": "json",
                "content_args": {"unquoted_keys": True},
            }
        ),
        template({"open": "<c>", "content": "kv-lines"}),
        template({"open": "<c>", "content": "json", "transform": {"function": {"name": "{content.x}"}}}),
        template(None, reasoning_content={"open_pattern": "x|y", "close": "z"}),
        template(None, citations={"open": "<c>", "close": "</c>"}),
        '{"fields": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    ],
)
def test_what_there_are_no_words_for_is_not_used(text: str) -> None:
    assert read_response_template(text) is None


def test_a_checkpoints_template_has_the_first_word_on_what_it_describes() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    fields = parse_request(ChatRequest, body, RequestLimits())
    traits = TokenizerTraits(tool_parser="mistral", reasoning_parser="mistral", reads_tools=True)
    described = replace(traits, response_template=template(TEMPLATES["objects"][0]))
    choice = choose_parser(fields, described)
    assert (choice.tool_parser, choice.reasoning_parser) == (RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
    assert choice.thoughts_end("<think>\n") == "</think>"
    assert {"<tool_call>", "</tool_call>", "<think>"} <= choice.markers
    thoughts = choose_parser(fields, replace(traits, response_template=template(None)))
    assert (thoughts.tool_parser, thoughts.reasoning_parser) == ("mistral", RESPONSE_TEMPLATE)
    assert choose_parser(fields, replace(traits, response_template="{}")).reasoning_parser == "mistral"
