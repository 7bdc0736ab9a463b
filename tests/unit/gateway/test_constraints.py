"""From response_format, structured_outputs, guided parameters and tools to constraints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from catenary.v1 import common_pb2
from gateway.constraints import CallableFunction, Wanted, wanted_calls, wanted_of
from gateway.errors import ApiError
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from tests.support.constraints import Language

MESSAGES = [{"role": "user", "content": "x"}]
LIMITS = RequestLimits()
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "$ref": {"const": None}},
    "required": ["n"],
}
TAG = {"triggers": ["<t"], "structures": [{"begin": "<t>", "schema": {"const": None}, "end": "</t>"}]}


def both(**fields: Any) -> Wanted | None:
    """Chats and completions take the same."""
    chat = parse_request(ChatRequest, {"model": "m", "messages": MESSAGES, **fields}, LIMITS)
    text = parse_request(CompletionRequest, {"model": "m", "prompt": "x", **fields}, LIMITS)
    wanted = wanted_of(chat)
    assert wanted_of(text) == wanted
    return wanted


def language(wanted: Wanted | None) -> Language:
    assert wanted is not None
    return Language(ConstraintKind(wanted.kind), wanted.source, closed=wanted.closed)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        both(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "", "grammar": "", "json": "", "structural_tag": ""}},
        {"guided_json": "", "guided_regex": "", "guided_grammar": ""},
        {"guided_json_object": False},
        {"guided_json": None, "guided_decoding_backend": "auto"},
        {"guided_whitespace_pattern": None},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert both(**fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, 1, {"type": "object"}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a-B_9", "strict": True, "schema": SCHEMA, "description": "d"},
                }
            },
            1,
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, 1, SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, 1, SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            1,
            {"type": "object"},
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, 1, SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, 1, SCHEMA, "guided_json"),
        ({"guided_json_object": True}, 1, {"type": "object"}, "guided_json_object"),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", **TAG}}},
            4,
            TAG,
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG), "disable_fallback": True}},
            4,
            TAG,
            "structured_outputs.structural_tag",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "at_least_one": True}},
            4,
            TAG | {"at_least_one": True, "stop_after_first": False},
            "response_format",
        ),
    ],
)
def test_json_kinds(fields: dict[str, Any], kind: int, source: Any, param: str) -> None:
    wanted = both(**fields)
    assert wanted is not None
    assert (wanted.kind, json.loads(wanted.source), wanted.param) == (kind, source, param)
    plain = common_pb2.Constraint(kind=wanted.kind, source=wanted.source)
    assert wanted.opened().message() == plain
    plain.closed_objects = True
    assert wanted.message() == plain
    assert wanted.message("</think>").after == "</think>"


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, 2, "a+", "structured_outputs.regex"),
        ({"guided_regex": "a+"}, 2, "a+", "guided_regex"),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            5,
            'root ::= "a"',
            "structured_outputs.grammar",
        ),
        ({"guided_grammar": 'start: "a"'}, 3, 'start: "a"', "guided_grammar"),
        (
            {"structured_outputs": {"choice": ["b", "a", "b"]}},
            3,
            'start: "b" | "a"',
            "structured_outputs.choice",
        ),
        ({"guided_choice": ['"\n']}, 3, 'start: "\\"\\n"', "guided_choice"),
    ],
)
def test_text_kinds(fields: dict[str, Any], kind: int, source: str, param: str) -> None:
    assert both(**fields) == Wanted(common_pb2.ConstraintKind.ValueType(kind), source, param)


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ('root ::= "a"', 5),
        ('# of x\n\n  value::= "a"\nroot ::= value', 5),
        ('start: "a"', 3),
        ('start: "a ::= b"', 3),
        ('// b ::= c\nstart: "a"', 3),
        ('# b ::= c\nstart: "a"', 3),
        ('%import common.INT\nstart: "::=" INT', 3),
        ('?start: x\nx: "root ::= a"', 3),
    ],
)
def test_the_first_rule_tells_the_notation_of_a_grammar(grammar: str, kind: int) -> None:
    for fields in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        wanted = both(**fields)
        assert wanted is not None
        assert (wanted.kind, wanted.source) == (kind, grammar)


def test_no_other_text_is_taken_for_a_grammar_of_gbnf() -> None:
    odd = "root ::= a"
    choice = language(both(guided_choice=[odd, "b"]))
    assert odd in choice
    assert "b" in choice
    assert odd in language(both(guided_grammar=f'start: "{odd}"'))
    function = CallableFunction("f", {"properties": {odd: {"enum": [odd], "description": odd}}})
    for parser in ("", "pythonic", "hermes"):
        found = language(wanted_calls((function,), parser, required=True, single=True))
        arguments = json.dumps({odd: odd})
        call = (
            HERMES % ("f", arguments)
            if parser == "hermes"
            else f'[{{"name": "f", "parameters": {arguments}}}]'
        )
        assert call in found


def test_annotations_are_no_part_of_a_constraint() -> None:
    """So that one compiled grammar serves all wordings."""

    def schema(text: str) -> dict[str, Any]:
        inner = {"type": "string", "title": text, "default": text, "x-order": text, "examples": [text]}
        return {
            "title": text,
            "$schema": text,
            "type": "object",
            "properties": {"description": inner, "title": {"enum": [{"title": "t"}], "description": text}},
            "required": ["title"],
            "$defs": {"default": {"anyOf": [inner, {"items": inner, "type": "array"}]}},
            "description": text,
            "strict": True,
        }

    def wanted(text: str) -> list[Wanted | None]:
        value = schema(text)
        tag = {"triggers": ["<t"], "structures": [{"begin": "<t>", "schema": value, "end": "</t>"}]}
        function = CallableFunction("f", value, strict=True)
        return [
            both(guided_json=value),
            both(guided_json=json.dumps(value)),
            both(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": value}}),
            both(response_format={"type": "structural_tag", **tag}),
            both(structured_outputs={"structural_tag": tag}),
            *(
                wanted_calls((function,), parser, required=True, single=True)
                for parser in ("", "hermes", "glm45")
            ),
        ]

    first = wanted("a")
    assert first == wanted("b ::= c")
    for one in first:
        assert one is not None
        assert "b ::= c" not in one.source
    assert json.loads(first[0].source if first[0] else "")["properties"] == {
        "description": {"type": "string"},
        "title": {"enum": [{"title": "t"}]},
    }


def test_objects_that_list_their_properties_are_closed_unless_the_server_says_otherwise() -> None:
    wanted = both(guided_json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert '{"a": 1}' in language(wanted)
    assert '{"b": 1}' not in language(wanted)
    assert wanted is not None
    assert '{"b": 1}' in language(wanted.opened())
    assert '{"b": 1}' in language(both(guided_json={"type": "object"}))
    call = '{"name": "f", "parameters": {"a": 1, "b": 2}}'
    function = CallableFunction("f", {"properties": {"a": {"type": "integer"}}})
    calls = wanted_calls((function,), "", required=True, single=True)
    assert calls is not None
    assert f"[{call}]" not in language(calls)
    assert f"[{call}]" in language(calls.opened())


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.text(max_size=6))
def test_a_choice_allows_its_texts_and_no_other(choices: list[str], other: str) -> None:
    """Whatever characters of grammars are in them."""
    found = language(both(guided_choice=choices))
    for choice in choices:
        assert choice in found
    assert (other in found) == (other in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": 123}}, "response_format.type"),
        ({"response_format": {"type": "hiccup", "schema": 123}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 123}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 123}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": None, "schema": {}}},
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "text", "triggers": ["a"]}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, "response_format.structures"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"whitespace_pattern": " *", "regex": "a"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": {"type": "x", **TAG}}},
            "structured_outputs.structural_tag.type",
        ),
        ({"structured_outputs": {"backend": "xgrammar", "regex": "a"}}, "structured_outputs.backend"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"guided_regex": "a" * 131_073}, "guided_regex"),
        ({"guided_grammar": "é" * 65_537}, "guided_grammar"),
        ({"guided_json": {"a": [[[]]] * 10_000}}, "guided_json"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.advisory("CVE-2024-27454")
def test_depth_is_bounded_before_anything_recurses() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"properties": {"a": deep}}
    for fields, param in (
        ({"guided_json": deep}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": deep}}},
            "response_format.json_schema.schema",
        ),
    ):
        error = refused(**fields)
        assert error.param == param
        assert "64" in error.message


ADD = CallableFunction(
    "add",
    {
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": ["integer", "null"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}},
    },
    strict=True,
)
NOW = CallableFunction("now")
HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "auto", "required", "single"),
    [
        ("Hello", True, False, False),
        (HERMES % ("add", '{"a": 1, "b": null}'), True, True, True),
        ("So: " + HERMES % ("add", '{"a": 1, "b": 2}'), True, False, False),
        (HERMES % ("now", "{}"), True, True, True),
        (HERMES % ("now", '{"zone": 1}'), True, False, False),
        (HERMES % ("add", '{"a": "1", "b": 2}'), False, False, False),
        (HERMES % ("sub", "{}"), False, False, False),
        (HERMES % ("now", "{}") + "\n" + HERMES % ("now", "{}"), True, True, False),
        # Behind a required call stands nothing but another one.
        (HERMES % ("now", "{}") + "\nAlso I can help.", True, False, False),
        (HERMES % ("now", "{}") + "\n" + HERMES % ("now", "{}") + " The output", True, False, False),
    ],
)
def test_calls_in_a_models_format(text: str, auto: bool, required: bool, single: bool) -> None:
    tools = (ADD, NOW)
    assert (text in language(wanted_calls(tools, "hermes", required=False, single=False))) == auto
    assert (text in language(wanted_calls(tools, "hermes", required=True, single=False))) == required
    assert (text in language(wanted_calls(tools, "hermes", required=True, single=True))) == single


@pytest.mark.parametrize("parser", ["", "pythonic"])
def test_calls_as_an_array_where_a_format_holds_no_json(parser: str) -> None:
    many = language(wanted_calls((ADD, NOW), parser, required=True, single=False))
    one = language(wanted_calls((ADD, NOW), parser, required=True, single=True))
    call = '{"name": "add", "parameters": {"a": 1, "b": null}}'
    other = '{"name": "now", "parameters": {}}'
    assert f"[{call}]" in one
    assert f"[{call}, {other}]" in many
    assert f"[{call}, {other}]" not in one
    assert "[]" not in many
    assert "[" + call.replace("1", '"1"') + "]" not in many
    assert "Hello" not in many


def test_tools_without_a_reason_constrain_nothing() -> None:
    assert wanted_calls((NOW,), "hermes", required=False, single=False) is None
    value = Wanted.json(common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, {"type": "integer"}, "response_format")
    either = wanted_calls((NOW,), "hermes", required=False, single=True, otherwise=value)
    assert either is not None
    assert either.part == value
    assert "12" in language(either)
    assert "twelve" not in language(either)
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in language(either)
    with pytest.raises(ApiError, match="response_format"):
        wanted_calls((NOW,), "pythonic", required=False, single=True, otherwise=value)
    # Its calls are JSON themselves.
    with pytest.raises(ApiError):
        wanted_calls((NOW,), "llama3_json", required=False, single=True, otherwise=value)
    calls = language(wanted_calls((NOW,), "llama3_json", required=True, single=True, otherwise=value))
    assert '{"name": "now", "parameters": {}}' in calls
    # A required call leaves nothing for the other constraint to say, which is checked all the same.
    for parser in ("", "pythonic", "hermes"):
        wanted = wanted_calls((NOW,), parser, required=True, single=True, otherwise=value)
        alone = wanted_calls((NOW,), parser, required=True, single=True)
        assert wanted is not None
        assert alone is not None
        assert (wanted.kind, wanted.source, wanted.part) == (alone.kind, alone.source, value)
    with pytest.raises(ApiError) as caught:
        wanted_calls((ADD, NOW), "pythonic", required=False, single=False)
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_names_and_texts_with_characters_of_grammars_stay_texts() -> None:
    odd = CallableFunction("a-b_9", {"properties": {'"]} | "\n\\': {"enum": ['"}\n%json', "/.*/"]}}})
    for parser in ("hermes", ""):
        found = language(wanted_calls((odd,), parser, required=True, single=True))
        arguments = json.dumps({'"]} | "\n\\': '"}\n%json'})
        text = (
            HERMES % ("a-b_9", arguments) if parser else f'[{{"name": "a-b_9", "parameters": {arguments}}}]'
        )
        assert text in found
