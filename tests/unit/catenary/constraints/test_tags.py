"""Structural tags: what they allow, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.constraints import (
    ConstraintKind,
)
from tests.support.constraints import CONTROL, Language, refusal

SCHEMA, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
GRAMMAR, TAG = ConstraintKind.GRAMMAR, ConstraintKind.STRUCTURAL_TAG


CALLS = {
    "triggers": ["<call"],
    "structures": [
        {"begin": "<call=add>", "schema": {"type": "integer"}, "end": "</call>"},
        {"begin": "<call=say>", "end": "</call>"},
    ],
}


@pytest.mark.parametrize(
    ("text", "plain", "required", "single", "one"),
    [
        ("", True, False, True, False),
        ("Hello <cal", True, False, True, False),
        ("<call=add>12</call>", True, True, True, True),
        ("<call=say>any <b> text</call>", True, True, True, True),
        ("Hi <call=add>12</call>", True, False, True, False),
        ("<call=add>12</call> done", True, True, False, False),
        ("<call=add>1</call><call=say>x</call>", True, True, False, False),
        ("<call", False, False, False, False),
        ("<call=mul>1</call>", False, False, False, False),
        ("<call=add>x</call>", False, False, False, False),
        ("a <call=add>1</call> b <call c", False, False, False, False),
    ],
)
def test_tags(text: str, plain: bool, required: bool, single: bool, one: bool) -> None:
    assert (text in Language(TAG, CALLS)) == plain
    assert (text in Language(TAG, CALLS | {"at_least_one": True})) == required
    assert (text in Language(TAG, CALLS | {"stop_after_first": True})) == single
    assert (text in Language(TAG, CALLS | {"at_least_one": True, "stop_after_first": True})) == one


@pytest.mark.parametrize(
    ("text", "many", "one"),
    [
        ("<call=add>12</call>", True, True),
        ("<call=add>12</call><call=say>x</call>", True, False),
        ("<call=add>12</call>\n\n<call=say>x</call> <call=add>1</call>", True, False),
        ("<call=add>12</call>\n\n\n<call=say>x</call>", False, False),
        ("<call=add>12</call> done", False, False),
        ("<call=add>12</call>\n", False, False),
        ("so <call=add>12</call>", False, False),
        ("", False, False),
    ],
)
def test_only_tags(text: str, many: bool, one: bool) -> None:
    only = CALLS | {"at_least_one": True, "only_tags": True}
    assert (text in Language(TAG, only)) == many
    assert (text in Language(TAG, only | {"stop_after_first": True})) == one
    assert "only_tags needs at_least_one" in refusal(TAG, CALLS | {"only_tags": True})


@pytest.mark.parametrize(
    ("text", "free", "required", "single"),
    [
        ('{"a": 1}', True, False, True),
        ("<call=add>12</call>", True, True, True),
        ("<call=add>12</call>\n<call=say>x</call>", True, True, False),
        ("<call=add>12</call><call=say>x</call>", True, True, False),
        ('<call=add>12</call>{"a": 1}', False, False, False),
        ("Hello", False, False, False),
        ('{"a": "x"}', False, False, False),
        ("", False, False, False),
    ],
)
def test_tags_or_a_value(text: str, free: bool, required: bool, single: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    either = CALLS | {"otherwise": schema}
    assert (text in Language(TAG, either)) == free
    assert (text in Language(TAG, either | {"at_least_one": True})) == required
    assert (text in Language(TAG, either | {"stop_after_first": True})) == single
    like_json = {"triggers": ["{"], "structures": [{"begin": '{"f": ', "schema": {}, "end": "}"}]}
    assert "begins like JSON" in refusal(TAG, like_json | {"otherwise": {}})
    assert '{"f": 1}' in Language(TAG, like_json | {"otherwise": {}, "at_least_one": True})
    refused = refusal(TAG, json.dumps(CALLS | {"otherwise": {"type": "what"}}))
    assert "type" in refused


def test_tags_of_control_tokens() -> None:
    call, end = CONTROL.values()
    source = {
        "triggers": ["<|call|>"],
        "structures": [
            {"begin": "<|call|>f ", "schema": {"type": "integer"}, "end": "<|end|>"},
            {"begin": "<|call|>g ", "end": "<|end|>\n"},
        ],
    }
    tags = Language(TAG, source, CONTROL)
    assert ["Hi ", call, "f 12", end] in tags
    assert ["Hi ", call, "f 12", end, call, "g x", end, "\n."] in tags
    assert ["Hi ", call, "h 12", end] not in tags
    # Other control tokens part the text, as they do without a constraint.
    assert ["Hi ", end, end, "there", call, "f 12", end] in tags
    # Spelled in text it is text.
    assert "Hi <|call|>zzz" in tags
    first = Language(TAG, source | {"at_least_one": True, "stop_after_first": True}, CONTROL)
    assert [call, "f 12", end] in first
    assert ["Hi", call, "f 12", end] not in first


def test_a_trigger_that_only_begins_with_a_control_token() -> None:
    """As in OpenAI's harmony format, where other channels begin with the same token."""
    call, end = CONTROL.values()
    source = {
        "triggers": ["<|call|>commentary to="],
        "structures": [
            {"begin": "<|call|>commentary to=f ", "schema": {"type": "integer"}, "end": "<|end|>"}
        ],
    }
    tags = Language(TAG, source, CONTROL)
    assert [
        call,
        "analysis",
        end,
        "thoughts",
        end,
        call,
        "commentary to=f 1",
        end,
        call,
        "final",
        end,
    ] in tags
    assert [call, "commentary to=g 1", end] not in tags
    assert [call, "commentary to=f x", end] not in tags
    assert [call, "commentary", end] in tags
    single = Language(TAG, source | {"stop_after_first": True}, CONTROL)
    assert [call, "analysis", end, call, "commentary to=f 1", end] in single
    assert [call, "analysis", end, call, "commentary to=f 1", end, call, "final", end] not in single


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({}, "field"),
        ("[]", "field"),
        ("{", "JSON"),
        ({**CALLS, "other": 1}, "field"),
        ({"triggers": [], "structures": []}, "needs"),
        ({"triggers": ["b"], "structures": [{"begin": "a", "end": "x"}]}, "begin"),
        ({"triggers": ["a", "c"], "structures": [{"begin": "a", "end": "x"}]}, "trigger"),
        ({"triggers": [""], "structures": [{"begin": "a", "end": "x"}]}, "empty"),
        ({"triggers": ["a"], "structures": [{"begin": "a"}]}, "needs an end"),
        ({"triggers": ["a"], "structures": [{"begin": "a", "schema": {"not": {}}}]}, "'not'"),
        (
            {
                "triggers": ["<", "x<"],
                "structures": [{"begin": "<", "end": "x"}, {"begin": "x<", "end": "x"}],
            },
            "hold",
        ),
        ({"triggers": ["a"], "structures": [{"begin": "a" * 1025, "end": "x"}]}, "1024"),
        ({"triggers": ["a"], "structures": [{"begin": "a", "end": "x"}] * 257}, "256"),
        ({"triggers": ["a<|end|>"], "structures": [{"begin": "a<|end|>", "schema": {}}]}, "beginning"),
    ],
)
def test_tags_that_are_refused(source: Any, named: str) -> None:
    assert named in refusal(TAG, source)


def test_a_trigger_that_begins_with_another_adds_nothing() -> None:
    tags = {
        "triggers": ["<a", "<a>", "<"],
        "structures": [
            {"begin": "<ab>", "schema": {"type": "integer"}},
            {"begin": "<c>", "end": "</c>"},
            {"begin": "<a>", "end": "."},
        ],
    }
    found = Language(TAG, tags)
    assert "x<ab>1" in found
    assert "x<c>y</c>z" in found
    assert "<d>" not in found


def test_structures_of_parameters() -> None:
    call, end = CONTROL.values()
    source: dict[str, Any] = {
        "triggers": ["<f"],
        "structures": [
            {
                "begin": "<f>",
                "end": "</f>",
                "parameters": [
                    {"begin": "a=", "end": ";", "schema": {"type": "integer"}},
                    {"begin": "b=", "end": ";", "texts": ["x|y", "z"], "optional": True},
                    {"begin": "c=<|call|>", "end": "<|end|>", "without": ["no"], "optional": True},
                ],
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    }
    found = Language(TAG, source, CONTROL)
    assert "<f>a=1;</f>" in found
    assert "<f>a=1;b=x|y;</f>" in found
    assert ["<f>a=1;c=", call, "any; text", end, "</f>"] in found
    assert ["<f>a=1;c=", call, "no", end, "</f>"] not in found
    for text in ("<f></f>", "<f>a=x;</f>", "<f>b=z;a=1;</f>", "<f>a=1;b=y;</f>", "<f>a=1;"):
        assert text not in found
    (structure,) = source["structures"]
    good = {"begin": "a=", "end": ";"}
    for parameters, text in (
        ([{**good, "end": ""}], "begin and an end"),
        ([{**good, "texts": []}], "empty"),
        ([{**good, "texts": ["a", ""]}], "empty"),
        ([{**good, "texts": ["a"], "schema": {}}], "not both"),
        ([{**good, "without": [""]}], "empty"),
        ([{**good, "begin": "x" * 2000}], "1024"),
        ([{**good, "texts": ["a"] * 2001}], "2000"),
        ([good] * 1001, "1000"),
        ([{**good, "end": ";<|end|>"}], "control token"),
        ([{**good, "schema": {"type": "what"}}], "type"),
        ([{**good, "x": 1}], "unknown"),
    ):
        assert text in refusal(TAG, source | {"structures": [structure | {"parameters": parameters}]})
    assert "not both" in refusal(TAG, source | {"structures": [structure | {"schema": {}}]})
