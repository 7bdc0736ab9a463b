"""Constraints: what is refused and how it is named, and what the rest allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.constraints import (
    ConstraintError,
    ConstraintKind,
    ConstraintLimits,
    control_tokens,
    to_llguidance,
)
from tests.support.constraints import BYTES, CONTROL, Language, refusal

SCHEMA, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
GRAMMAR, GBNF, TAG = ConstraintKind.GRAMMAR, ConstraintKind.GBNF, ConstraintKind.STRUCTURAL_TAG
LIMITS = ConstraintLimits()


def in_def(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/a", "$defs": {"a": schema, **more}}


@pytest.mark.parametrize(
    "keyword",
    [
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "not",
        "uniqueItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
        "x-guidance",
        "divisibleBy",
        "nonsense",
    ],
)
def test_a_keyword_that_cannot_be_honoured_is_named(keyword: str) -> None:
    value: Any = True if keyword == "uniqueItems" else {}
    for schema in (
        {keyword: value},
        {"type": "object", "properties": {"a": {"type": "array", "items": {keyword: value}}}},
        in_def({"anyOf": [{"type": "null"}, {keyword: value}]}),
    ):
        assert f"'{keyword}'" in refusal(SCHEMA, schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "stsring"}}}, "'type'"),
        ({"type": "string", "pattern": "["}, "'pattern'"),
        ({"type": "string", "pattern": "{{ 7*7 }}"}, "'pattern'"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern'"),
        ({"type": "string", "pattern": "a^b"}, "anchor"),
        ({"type": "object", "patternProperties": {"(": {}}}, ""),
        ({"type": "object", "patternProperties": {f"^{i}x": {} for i in range(17)}}, "'patternProperties'"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "'patternProperties'"),
        ({"type": "string", "format": "regex"}, "'format'"),
        ({"minLength": -1}, "'minLength'"),
        ({"maxItems": 1.5}, "'maxItems'"),
        ({"minimum": "3"}, "'minimum'"),
        ({"required": "a"}, "'required'"),
        ({"enum": []}, "'enum'"),
        ({"anyOf": []}, "'anyOf'"),
        ({"items": 5}, "'items'"),
        ({"multipleOf": 0}, "'multipleOf'"),
        ({"multipleOf": 1000003}, "'multipleOf'"),
        ({"allOf": [{"multipleOf": divisor} for divisor in (7, 11, 13, 17)]}, "'multipleOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
        ({"minProperties": 1, "properties": {"a": {}}}, "'minProperties'"),
        ({"enum": list(range(LIMITS.max_alternatives + 1))}, "'enum'"),
        ({"properties": {f"p{i}": True for i in range(LIMITS.max_properties + 1)}}, "'properties'"),
        ({"$ref": "https://example.com/x"}, "'$ref'"),
        ({"$ref": "#/$defs/none"}, "'$ref'"),
        ({"$ref": "#/$defs/a/type", "$defs": {"a": {"type": "string"}}}, "'$ref'"),
        ({"$ref": "#/properties", "properties": {"a": {}}}, "'$ref'"),
        ({"$defs": {"a": {"$id": "b"}}}, "'$id'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no value"),
        (False, "no value"),
        (5, "object"),
        ("", "JSON"),
        ("[", "JSON"),
        ('{"minimum": 1e400}', "JSON"),
        ('{"minimum": NaN}', "JSON"),
        ('{"const": "\\ud800"}', "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_schemas_that_are_refused(schema: Any, named: str) -> None:
    assert named in refusal(SCHEMA, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        in_def({"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
        in_def({"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}),
        in_def({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, b={"$ref": "#/$defs/a"}),
    ],
)
def test_a_schema_that_only_refers_to_itself_is_refused(schema: dict[str, Any]) -> None:
    assert "'$ref'" in refusal(SCHEMA, schema)


def test_a_recursive_schema_with_an_end_is_honoured() -> None:
    tree = in_def(
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "additionalProperties": False}
    )
    assert '{"n": {"n": {}}}' in Language(SCHEMA, tree)
    assert '{"n": {"n": 1}}' not in Language(SCHEMA, tree)
    listed = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}
    assert "[null, [[], null]]" in Language(SCHEMA, listed)


@pytest.mark.advisory("CVE-2025-57809")
def test_depth_size_and_references_are_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"properties":{"a":' * depth + "{}" + "}}" * depth

    assert "{}" in Language(SCHEMA, nested(31))
    assert "64 levels" in refusal(SCHEMA, nested(32))
    assert "bytes" in refusal(SCHEMA, nested(20_000))
    assert "20000 values" in refusal(SCHEMA, {"examples": list(range(20_000))})
    for length, fits in ((200, True), (600, False)):
        chain: dict[str, Any] = {
            f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
            for i in range(length)
        }
        schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{length}": True}}
        if fits:
            assert "{}" in Language(SCHEMA, schema)
        else:
            assert "'$ref'" in refusal(SCHEMA, schema)


def test_annotations_and_neutral_values_are_taken() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/a",
        "title": "A",
        "description": "d",
        "type": "object",
        "properties": {
            "x-guidance": {"type": "integer", "default": 3, "x-order": 1, "nullable": False, "examples": [1]},
            "contains": {"type": "array", "uniqueItems": False},
        },
        "required": ["x-guidance"],
        "additionalProperties": False,
    }
    assert '{"x-guidance": 5, "contains": []}' in Language(SCHEMA, schema)
    assert '{"x-guidance": "5"}' not in Language(SCHEMA, schema)


def test_white_space_between_tokens_is_bounded() -> None:
    value = Language(SCHEMA, {"type": "object"})
    most = LIMITS.max_whitespace
    assert json.dumps({"a": [1, {"b": 2}]}, indent=4) in value
    assert '{"a":' + " " * most + "1}" in value
    assert '{"a":' + "\n" * (most + 1) + "1}" not in value
    assert '{"a":1}\n' not in value


def test_text_that_is_not_ascii_stays_as_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {"心情": {"enum": ["开心", "难过"]}},
        "required": ["心情"],
        "additionalProperties": False,
    }
    mood = Language(SCHEMA, schema)
    assert '{"心情": "开心"}' in mood
    assert json.dumps({"心情": "开心"}) not in mood
    assert '"é😀"' in Language(SCHEMA, {"type": "string"})


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "empty"),
        ("[", "class"),
        ("(?<=a)b", "Look-around"),
        ("a(?!b)", "Look-around"),
        (r"(a)\1", "Back references"),
        (r"(?P<n>a)(?P=n)", "Back references"),
        (r"\bfoo", "Word boundaries"),
        ("a{99999}", "too many characters"),
        ("(a{1,1000}){1,1000}", "too many characters"),
        ("a{1,1000}{1,1000}", "repeats a repetition"),
        ("a++", "repeats a repetition"),
        ("a*+b", "repeats a repetition"),
        ("a??+", "repeats a repetition"),
        ("(?>a+)b", "Atomic"),
        ("((a{1,100}){1,100}){1,100}", "too many characters"),
        ("(" * 30_000 + "a", "nested deeper"),
        ("(" * 30_000 + "a" + ")" * 30_000, "nested deeper"),
        ("a)", "not opened"),
        ("(a", "not valid"),
        ("a{,5}", "no repetition"),
        ("\\", "escape"),
        ("a^b", "anchor"),
        (r"\Qa", "not valid"),
        ("(?-u:\\xff)", "not valid"),
    ],
)
def test_regular_expressions_that_are_refused(source: str, named: str) -> None:
    assert named in refusal(REGEX, source)


def test_a_regular_expression_matches_the_whole_text() -> None:
    words = Language(REGEX, r"^(yes|no)/[0-9]{2}é$")
    assert "yes/12é" in words
    assert "yes/12é." not in words
    assert " yes/12é" not in words
    # What backtracks in others is linear here.
    for source in ("(a|a)*b", "(a+)+b", "(.*){1,1000}b"):
        assert "a" * 50 + "b" in Language(REGEX, source)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("start: start", "no text"),
        ("start: foo", "does not define (line 1"),
        ('foo: "a"', "'start'"),
        ('start: "a"\nstart: "b"', "twice"),
        ("start: A\nA: A", "itself"),
        ("start: " + "(" * 30_000 + '"a"', "nested deeper"),
        ('start: "a"{1,100000}', "20000 times"),
        ("start: /a(?=b)/", "Look-around"),
        ('start: %json {"contains": {}}', "'contains'"),
        ("start: %json {", "JSON"),
        ("start: <|none|>\n", "control token"),
        ('{"grammars": [{"lark_grammar": "start: /a/"}]}', "compiled"),
    ],
)
def test_grammars_that_are_refused(source: str, named: str) -> None:
    assert named in refusal(GRAMMAR, source)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "empty"),
        ('start: "a"', "line 1"),
        ('rout::="x"', "'root'"),
        ("root ::= root", "circle"),
        ("root ::= a\na ::= root", "circle"),
        ('root ::= "x" a\na ::= "y" a', "circle"),
        ("root ::= foo", "does not define"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= (", "line 1"),
        ('x ::= "a"\nroot ::= "a', "line 2"),
        ("root ::= " + "(" * 30_000 + '"a"', "nested deeper"),
        ('root ::= "a"' + "*" * 1000, "repeat"),
        ('root ::= "a"{1000000}', "20000 times"),
        ("root ::= [z-a]", "range"),
        ('root ::= "\\ud800"', "escape"),
    ],
)
def test_grammars_of_gbnf_that_are_refused(source: str, named: str) -> None:
    assert named in refusal(GBNF, source)


def test_the_number_of_rules_is_bounded() -> None:
    """A chain of a few thousand overflows llguidance's stack."""
    count = LIMITS.max_rules + 1
    lark = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count)) + f'\nr{count}: "x"\nstart: r0'
    assert "rules" in refusal(GRAMMAR, lark)
    assert "rules" in refusal(GBNF, lark.replace(":", " ::=").replace("start", "root"))


def test_gbnf_lets_the_rest_of_a_rule_match() -> None:
    """Where a lexeme of Lark would take too much."""
    assert "abx" in Language(GBNF, 'root ::= [a-z]+ "x"')
    assert "abc" in Language(GBNF, 'root ::= "ab" "d" | "a" "bc"')
    calls = Language(
        GBNF,
        'root  ::= call (", " call){0,2}  # up to three\n'
        'call  ::= name "(" value? ")"\n'
        "name  ::= [a-zà-ü_] [a-z0-9_\\-]* \n\n"
        'value ::= [0-9]+ |\n  "\\"" [^"\\\\]* "\\"" | call\n',
    )
    assert 'f(1), gé-2("é\\u0001"), h(f())'.replace("gé", "ég").replace("\\u0001", "\x01") in calls
    assert "f(1), f(1), f(1), f(1)" not in calls
    assert "F(1)" not in calls


def test_lark_is_taken_with_json_in_it() -> None:
    grammar = Language(GRAMMAR, 'start: "<" body ">"  // see\nbody: %json {"type": "integer", "title": "n"}')
    assert "<12>" in grammar
    assert "<x>" not in grammar
    for char in map(chr, (*range(0x20), 0x7F)):
        if char != "\n":
            # Lark itself takes them; only a line break must be escaped there.
            found = Language(GRAMMAR, f'start: "a{char}b" /{char if char > " " else "x"}/')
            assert f"a{char}b{char if char > ' ' else 'x'}" in found
            assert "ab" not in found
    assert "a\\\x7fb" in Language(GRAMMAR, 'start: "a\\\\\x7fb"')
    assert "9-8-7" in Language(GRAMMAR, "start: start /-/ N | N\nN: /[0-9]/")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GRAMMAR, "/\\" * 60_000),
        (GRAMMAR, '"\\' * 60_000),
        (GRAMMAR, "start: a" + " " * 120_000),
        (GBNF, 'root ::= "a"{1' + " " * 120_000),
        (GBNF, "root ::= " + "a|" * 60_000),
        (GRAMMAR, "start: " + "{ " * 60_000),
        (REGEX, "[" * 120_000),
        (REGEX, "\\p{" * 40_000),
        (SCHEMA, '{"patternProperties": {' + ",".join(f'"^{i}x.*": true' for i in range(900)) + "}}"),
    ],
)
def test_no_text_takes_long_to_refuse(kind: ConstraintKind, source: str) -> None:
    """What is quadratic in some reader takes minutes at this length."""
    refusal(kind, source)


def test_sizes_are_checked_before_all_else() -> None:
    for kind in ConstraintKind:
        with pytest.raises(ConstraintError, match="bytes"):
            to_llguidance(kind, "é" * LIMITS.max_bytes)


def test_control_tokens_of_a_tokenizer_file() -> None:
    call = CONTROL["<|call|>"]
    file = {
        "added_tokens": [
            {"id": call, "content": "<|call|>", "special": True, "normalized": False},
            {"id": 65, "content": "A", "special": False},
            {"id": 1000, "content": "<|beyond|>", "special": True},
        ],
        "model": {"type": "BPE"},
    }
    assert control_tokens(json.dumps(file).encode(), BYTES) == {"<|call|>": call}
    assert control_tokens(b"{}", BYTES) == {}
    with pytest.raises(ValueError, match="array"):
        control_tokens(b"[]", BYTES)
