"""Hostile schemas, expressions and grammars over HTTP: refused by name, quickly, and felt by nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway import Stack, saying, script
from tests.support.http import Answer
from tests.support.neighbour import neighbour
from tests.support.stack_fixtures import StartStack

# The aim is 100 ms; this machine may be busy.
LONGEST_S = 2.0


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


def deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


IN_FORMAT = "response_format.json_schema.schema"
STRINGS = {"enum": [f"value {number}" for number in range(20_000)]}
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    # CVE-2025-48942
    ("unknown type", {"guided_json": {"properties": {"a": {"type": "stsring"}}}}, "guided_json"),
    ("unknown type in a format", schema({"properties": {"a": {"type": "stsring"}}}), IN_FORMAT),
    # CVE-2025-48943
    ("open class", {"guided_regex": "["}, "guided_regex"),
    ("look-behind", {"guided_regex": "(?<=a)b"}, "guided_regex"),
    ("back reference", {"guided_regex": "\\1"}, "guided_regex"),
    ("long repetition", {"guided_regex": "a{99999}"}, "guided_regex"),
    ("the same as vLLM has it", {"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    # CVE-2025-48944
    ("a template as a pattern", schema({"type": "string", "pattern": "{{ 7*7 }}"}), IN_FORMAT),
    ("an open class as a pattern", schema({"type": "string", "pattern": "["}), IN_FORMAT),
    # CVE-2026-55574
    ("nested repetitions", {"guided_regex": "a{1,1000}{1,1000}"}, "guided_regex"),
    # CVE-2026-105757
    ("empty grammar", {"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ("empty schema", {"structured_outputs": {"json": " "}}, "structured_outputs.json"),
    # CVE-2025-57809
    ("root is root", {"guided_grammar": "root ::= root"}, "guided_grammar"),
    ("root is a is root", {"guided_grammar": "root ::= a\na ::= root"}, "guided_grammar"),
    ("start is start", {"guided_grammar": "start: start"}, "guided_grammar"),
    ("schema is schema", {"guided_json": {"$ref": "#"}}, "guided_json"),
    # CVE-2026-25048, CVE-2026-2069
    ("parentheses of GBNF", {"guided_grammar": "root ::= " + "(" * 30_000 + '"a"'}, "guided_grammar"),
    ("parentheses of Lark", {"guided_grammar": "start: " + "(" * 30_000 + '"a"'}, "guided_grammar"),
    ("parentheses of a regex", {"guided_regex": "(" * 30_000 + "a"}, "guided_regex"),
    ("many rules", {"guided_grammar": "".join(f"r{i}: r{i + 1}\n" for i in range(5000))}, "guided_grammar"),
    # CVE-2025-58446
    ("20,000 strings", {"guided_json": STRINGS}, "guided_json"),
    # CVE-2024-27454
    ("a schema of depth 200", {"guided_json": deep(200)}, "guided_json"),
    ("a schema of depth 5000 in a text", {"guided_json": "[" * 5000 + "]" * 5000}, "guided_json"),
    ("100,000 brackets in a text", {"guided_json": "[" * 100_000}, "guided_json"),
    # Others that cost time or memory in some back end.
    ("a large divisor", {"guided_json": {"multipleOf": 1000003}}, "guided_json"),
    ("a billion items", {"guided_json": {"type": "array", "minItems": 10**9}}, "guided_json"),
    (
        "2^30 choices",
        {
            "guided_json": {
                "allOf": [{"anyOf": [{"minimum": i}, {"minLength": i, "type": "string"}]} for i in range(30)]
            }
        },
        "guided_json",
    ),
    ("a long regex", {"guided_regex": "a" * 200_000}, "guided_regex"),
    ("5000 choices", {"guided_choice": ["a"] * 5000}, "guided_choice"),
]
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("nothing", {"structured_outputs": {}}),
    ("(a|a)*b", {"guided_regex": "(a|a)*b"}),
    ("(a+)+b", {"guided_regex": "(a+)+b"}),
    ("(.*){1,1000}", {"guided_regex": "(.*){1,1000}"}),
    ("a union with null", {"guided_json": {"type": ["string", "null"]}}),
    (
        "1000 properties",
        {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}},
    ),
    ("choices of grammar characters", {"guided_choice": ['"', "a\nb", "%json {}", "/.*/", "\\", "|"]}),
]


def assert_refused(answer: Answer, param: str) -> None:
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.advisory(
    "CVE-2025-48942", "CVE-2026-55574", "CVE-2026-105757", "CVE-2025-57809", "CVE-2025-58446"
)
async def test_each_is_refused_by_name_or_harmless(
    start_stack: StartStack, say: Callable[[str], None]
) -> None:
    stack = await start_stack(script(step_delay_ms=2))
    async with neighbour(stack, say, tokens=250):
        for name, fields, param in HOSTILE:
            started = time.perf_counter()
            answer = await stack.chat(max_tokens=1, **fields)
            taken = time.perf_counter() - started
            say(f"{name}: refused in {1000 * taken:.1f} ms: {answer.json()['error']['message'][:80]}")
            assert_refused(answer, param)
            assert taken < LONGEST_S
        for name, fields in HARMLESS:
            started = time.perf_counter()
            answer = await stack.chat(max_tokens=1, **fields)
            say(f"{name}: harmless in {1000 * (time.perf_counter() - started):.1f} ms")
            assert answer.status == 200, answer.body
    await stack.alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_comes_before_any_event(stack: Stack, stream: bool) -> None:
    answer = await stack.chat(stream=stream, response_format={"type": "json_schema", "json_schema": {}})
    assert_refused(answer, "response_format.json_schema.name")
    answer = await stack.chat(stream=stream, guided_regex="(")
    assert_refused(answer, "guided_regex")
    await stack.alive()


async def test_constraints_reach_the_engine_with_every_sample(start_stack: StartStack) -> None:
    """The scripted engine takes them and plays its script."""
    stack = await start_stack(script(saying("yes")))
    seen: list[Any] = []
    submit = stack.gateway.upstreams.session.submit

    def recording(spec: Any, *args: Any, **options: Any) -> int:
        seen.append(spec)
        return submit(spec, *args, **options)

    stack.gateway.upstreams.session.submit = recording  # type: ignore[method-assign]
    answer = await stack.chat(guided_choice=["yes", "no"], n=2)
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["yes", "yes"]
    assert [(spec.constraint.kind, spec.constraint.source) for spec in seen] == [
        (3, 'start: "yes" | "no"')
    ] * 2
    await stack.complete("x", max_tokens=1)
    assert not seen[-1].HasField("constraint")


async def test_a_tokenizer_that_is_away_is_no_fault_of_the_request(start_stack: StartStack) -> None:
    stack = await start_stack(failover_wait_s=0)
    stack.gateway.upstreams.tokenizers.targets.all.clear()
    answer = await stack.complete([5, 6], max_tokens=1, guided_regex="a")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "tokenizer_unavailable")


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "something"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "{{ 7*7 }}"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
        {"type": "object", "not": {}},
    ],
)
@pytest.mark.advisory("CVE-2025-48942")
async def test_malformed_tools_are_refused_where_they_bind(
    start_parsing: StartStack, parameters: Any
) -> None:
    """CVE-2025-48944: where nothing is made of them but text for the template, they are harmless."""
    stack = await start_parsing(script(saying("Hello.")))
    binding: list[dict[str, Any]] = [
        {"tools": [tool(parameters, strict=True)]},
        {"tools": [tool(parameters)], "tool_choice": "required"},
        {"tools": [tool(parameters)], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ]
    for fields in binding:
        assert_refused(await stack.chat(max_tokens=9, **fields), "tools")
    answer = await stack.chat(max_tokens=9, tools=[tool(parameters)])
    assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hello.")
    await stack.alive()


@pytest.mark.parametrize("types", [["string", "null"], None, "string"])
@pytest.mark.advisory("SGLang issue 16057")
async def test_tools_with_unions_and_without_types(start_parsing: StartStack, types: Any) -> None:
    """SGLang #16057."""
    property_ = {"anyOf": [{"type": "string"}, {"type": "null"}]} if types is None else {"type": types}
    strict = tool({"type": "object", "properties": {"a": property_}}, strict=True)
    stack = await start_parsing(
        script(saying('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'))
    )
    for extra in ({}, {"tool_choice": "required"}):
        answer = await stack.chat(tools=[strict], **extra)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"a": "x"}')
