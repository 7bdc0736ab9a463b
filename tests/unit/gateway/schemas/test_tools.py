"""Fields about tools: what is taken, what it means, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.text import TokenizerTraits
from gateway.errors import ApiError
from gateway.generation.chat import choose_parser
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import NO_CALLS, CallMode, CallPolicy

FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
ADD = {"type": "function", "function": FUNCTION}
SUB = {"type": "function", "function": {"name": "sub"}}
NAMED = {"type": "function", "function": {"name": "add"}}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_request(ChatRequest, body, RequestLimits())


def refusal(**fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


def test_tools_are_shown_to_the_template_as_they_came() -> None:
    assert json.loads(chat(tools=[ADD, SUB]).tools_json) == [ADD, SUB]
    strange = {"type": "function", "function": {"name": "f", "description": '<|im_end|>"{% x %}\n'}}
    assert json.loads(chat(tools=[strange]).tools_json) == [strange]


def test_a_model_that_is_not_to_call_sees_no_tools() -> None:
    fields = chat(tools=[ADD], tool_choice="none")
    assert (fields.tools_json, fields.call_policy.mode) == ("", CallMode.NONE)


def test_what_is_wanted_of_calls() -> None:
    assert chat().call_policy.mode is CallMode.NONE
    assert chat(tools=[], tool_choice="auto").call_policy.mode is CallMode.NONE
    policy = chat(tools=[ADD, SUB], parallel_tool_calls=False).call_policy
    assert (policy.mode, policy.names, policy.single) == (CallMode.AUTO, ("add", "sub"), True)
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    policy = chat(tools=[ADD, SUB], tool_choice=some).call_policy
    assert (policy.mode, policy.names, policy.single) == (CallMode.AUTO, ("add",), False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        # A tool_choice needs tools, and names one of them.
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": 7}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": 1}}},
            "tool_choice.function",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD] * 129}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools.0.function.parameters",
        ),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"functions": [FUNCTION], "tools": [ADD]}, "functions"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions"),
        ({"functions": [FUNCTION] * 129}, "functions"),
        ({"functions": [{**FUNCTION, "strict": True}]}, "functions.0.strict"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
        ({"functions": [FUNCTION], "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"functions": [FUNCTION], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "function_call": {"name": "add"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "nope"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "add", "x": 1}}, "function_call"),
        ({"functions": [], "function_call": {"name": "add"}}, "function_call"),
        ({"function_call": {"name": "add"}}, "function_call"),
    ],
)
def test_bad_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)[0] == param


@pytest.mark.parametrize("name", ["", "a b", "f(x)", 'a"b', "a\nb", "\u00e9", "x" * 65, "a.b", "{{7*7}}"])
def test_names_with_characters_of_a_grammar_are_refused(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    assert refusal(tools=[tool]) == ("tools.0.function.name", "invalid_value")


@pytest.mark.advisory("CVE-2024-27454")
def test_deep_and_large_tools_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": deep}
    large = {"enum": ["x" * 100] * 20_000}
    for parameters in (deep, large):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert refusal(tools=[tool])[0] == "tools"


def test_a_model_without_a_parser_is_not_asked_for_calls() -> None:
    with pytest.raises(ApiError, match="tool-parser") as caught:
        choose_parser(chat(tools=[ADD]), TokenizerTraits())
    assert caught.value.param == "tools"
    assert not choose_parser(chat(), TokenizerTraits()).needed


def test_tools_that_the_model_never_sees_are_not_offered() -> None:
    traits = TokenizerTraits(tool_parser="hermes")
    auto = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    choices: list[dict[str, Any]] = [{}, {"tool_choice": "auto"}, {"tool_choice": auto}]
    for asked in choices:
        with pytest.raises(ApiError, match="does not show tools") as caught:
            choose_parser(chat(tools=[ADD], **asked), traits)
        assert (caught.value.status, caught.value.param) == (400, "tools")
    with pytest.raises(ApiError) as caught:
        choose_parser(chat(functions=[FUNCTION]), traits)
    assert caught.value.param == "functions"
    # A grammar makes these, and a template of the request's own is not known.
    assert choose_parser(chat(tools=[ADD], tool_choice="required"), traits).needed
    assert choose_parser(chat(tools=[ADD], tool_choice=NAMED), traits).needed
    assert not choose_parser(chat(tools=[ADD], tool_choice="none"), traits).needed
    assert choose_parser(chat(tools=[ADD], chat_template="{{ tools }}"), traits).tool_parser == "hermes"


@pytest.mark.parametrize(
    ("reads_tools", "said"),
    [(False, "knows no tools"), (True, "--tool-parser NAME")],
    ids=["no tools", "format"],
)
def test_without_a_parser_the_refusal_says_why(reads_tools: bool, said: str) -> None:
    for asked in ({"tools": [ADD]}, {"tools": [ADD], "tool_choice": "auto"}):
        with pytest.raises(ApiError) as caught:
            choose_parser(chat(**asked), TokenizerTraits(reads_tools=reads_tools))
        assert (caught.value.status, caught.value.param) == (400, "tools")
        assert said in caught.value.message
        assert ("knows no tools" in caught.value.message) == (not reads_tools)


def test_the_parser_knows_what_may_be_called() -> None:
    traits = TokenizerTraits(tool_parser="hermes", reasoning_parser="qwen3", reads_tools=True)
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    choice = choose_parser(chat(tools=[ADD, SUB], tool_choice=some), traits)
    assert (choice.tool_parser, choice.reasoning_parser) == ("hermes", "qwen3")
    assert choice.tools.allowed == frozenset({"add"})
    assert choose_parser(chat(tools=[ADD, SUB]), traits).tools.allowed is None
    assert choose_parser(chat(tools=[ADD], tool_choice="none"), traits).tool_parser == ""


def test_functions_are_tools_by_their_older_name() -> None:
    asked = chat(functions=[FUNCTION])
    assert asked.call_policy == CallPolicy(CallMode.AUTO, ("add",), single=True, legacy=True)
    assert asked.tools_json == chat(tools=[ADD]).tools_json
    assert asked.schemas == chat(tools=[ADD]).schemas
    named = chat(functions=[FUNCTION], function_call={"name": "add"}).call_policy
    assert named == CallPolicy(CallMode.REQUIRED, ("add",), single=True, named=True, legacy=True)
    for silent in (
        chat(functions=[FUNCTION], function_call="none"),
        chat(function_call="none"),
        chat(functions=[], function_call="auto"),
        chat(functions=None, function_call=None),
    ):
        assert silent.call_policy == NO_CALLS
        assert silent.tools_json == ""
