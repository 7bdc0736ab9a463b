"""JSON schemas of clients: objects that are closed, and keywords that say nothing or could be others."""

from __future__ import annotations

import json
from datetime import date, timedelta
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintError, ConstraintKind, ConstraintLimits, clean_schema
from catenary.schema_notes import without_notes
from tests.support.constraints import Language, refusal

SCHEMA = ConstraintKind.JSON_SCHEMA
INTEGER = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}


def closed(schema: dict[str, Any]) -> Language:
    return Language(SCHEMA, schema, closed=True)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (A, {"a": 1}, {"a": 1, "c": 1}),
        ({"type": "object"}, {"c": 1}, 1),
        ({}, {"c": [{"d": 1}]}, None),
        ({**A, "additionalProperties": True}, {"a": 1, "c": 1}, {}),
        ({**A, "additionalProperties": {"type": "null"}}, {"a": 1, "c": None}, {"a": 1, "c": 1}),
        ({**A, "patternProperties": {"^x": INTEGER}}, {"a": 1, "x": 1, "c": 1}, {"a": 1, "x": "y"}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"a": 1, "c": 1}]),
        ({"anyOf": [A, B]}, {"b": 1}, {"a": 1, "b": 1}),
        ({"allOf": [A]}, {"a": 1}, {"a": 1, "c": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}),
        ({**A, "allOf": [{"properties": {"b": INTEGER}}]}, {"a": 1, "b": 1}, {"a": 1, "c": 1}),
        ({**A, "anyOf": [B, {"properties": {"d": INTEGER}}]}, {"a": 1, "b": 1}, {"a": 1, "c": 1}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"a": 1}, {"a": 1, "c": 1}),
        ({"$ref": "#/$defs/a", "properties": {"b": INTEGER}, "$defs": {"a": A}}, {"a": 1}, {"a": 1, "c": 1}),
        ({**A, "required": ["a", "b"]}, {"a": 1, "b": "x"}, {"a": 1, "b": 1, "c": 1}),
        ({"type": "object", "required": ["b"]}, {"b": 1, "c": 1}, {"c": 1}),
        # Used alone and as a part of another.
        (
            {
                "type": "object",
                "properties": {
                    "one": {"$ref": "#/$defs/a"},
                    "both": {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": INTEGER}}]},
                },
                "$defs": {"a": A},
            },
            {"one": {"a": 1}, "both": {"a": 1, "b": 2}},
            {"one": {"a": 1, "b": 2}},
        ),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema: Any, inside: Any, outside: Any) -> None:
    language = closed(schema)
    assert json.dumps(inside) in language
    jsonschema.validate(inside, schema)
    if outside is not None:
        assert json.dumps(outside) not in language
    # Without the flag the specification holds.
    opened = Language(SCHEMA, schema)
    assert json.dumps(inside) in opened
    if outside is not None:
        assert (json.dumps(outside) in opened) == jsonschema.Draft202012Validator(schema).is_valid(outside)


@pytest.mark.timeout(60)
def test_recursive_schemas_are_closed_too() -> None:
    node: dict[str, Any] = {
        "type": "object",
        "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v"],
    }
    plain = closed({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert '{"v": 1, "next": {"v": 2, "next": null}}' in plain
    assert '{"v": 1, "next": {"v": 2, "w": 3}}' not in plain
    joined = closed(
        {"allOf": [{"$ref": "#/$defs/node"}, {"properties": {"w": INTEGER}}], "$defs": {"node": node}}
    )
    assert '{"v": 1, "next": {"v": 2}, "w": 3}' in joined
    assert '{"v": 1, "u": 3}' not in joined


def _sharing(count: int, part: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    """A schema with so many objects that have a part in common."""
    return {"properties": {f"p{index}": part for index in range(count)}, "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        # 200 objects with the same 200 names, and 200 that each go through the same 200 references.
        _sharing(
            200,
            {"required": [], "$ref": "#/$defs/b"},
            b={"properties": {f"n{index}": True for index in range(200)}},
        ),
        _sharing(
            200,
            {"required": [], "$ref": "#/$defs/0"},
            **{str(index): {"required": [], "$ref": f"#/$defs/{index + 1}"} for index in range(200)},
            **{"200": {"properties": {"x": True}}},
        ),
    ],
    ids=["names", "references"],
)
def test_closing_does_not_multiply_what_objects_share(schema: Any) -> None:
    clean_schema(schema, ConstraintLimits())
    with pytest.raises(ConstraintError, match="list more than 20000 properties"):
        clean_schema(schema, ConstraintLimits(closed_objects=True))


NAMES = st.sampled_from("abcd")
OBJECTS = st.recursive(
    st.sampled_from([INTEGER, {"type": "null"}]),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
            },
            st.dictionaries(NAMES, inner, max_size=3),
            st.lists(NAMES),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda members: {"anyOf": members}),
        inner.map(lambda one: {"allOf": [one]}),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(OBJECTS, st.randoms())
def test_what_a_closed_schema_allows_satisfies_it_and_has_no_free_names(schema: Any, chance: Any) -> None:
    text = closed(schema).sample(chance.choice, most=200)
    if text is not None:
        value = json.loads(text)
        jsonschema.validate(value, schema)
        assert set(_names(value)) <= set("abcd")


def _names(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [*value, *(name for item in value.values() for name in _names(item))]


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "format": "int32"}, [5], ["x"]),
        ({"type": ["integer", "null"], "format": "date"}, [5, None], ["2024-01-01"]),
        ({"type": "number", "format": "regex"}, [5], ["x"]),
        ({"type": "string", "format": "starts_with", "pattern": "^a"}, ["ab"], ["b"]),
        ({"type": "string", "format": "base64"}, ["anything"], [5]),
        ({"type": "string", "format": "uuid", "pattern": "^a"}, [], ["a", "b"]),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["ab"], ["a", "abcd"]),
        ({"type": "array", "minItems": 1.0, "items": INTEGER}, [[1]], [[]]),
        ({"type": "string", "enumNames": ["A"], "strict": True, "x-y": 1, "errorMessage": "e"}, ["a"], [1]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": ["string", "null"], "nullable": True}, ["a", None], [1]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ["a"], [None]),
        ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"enum": ["a"], "nullable": True}, ["a"], [None]),
        (
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "number"},
            },
            [{"a": 1}, {}],
            [{"a": "x"}],
        ),
        ({"type": "object", "propertyNames": {}}, [{"a": 1}], [1]),
        ({"type": "object", "propertyNames": True}, [{"a": 1}], [1]),
        ({"type": "object", "propertyNames": {"title": "t", "description": "d"}}, [{"a": 1}], [1]),
        ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"type": "integer"}}, [{}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}}, [{"ab": 1}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"type": "string", "minLength": 2}}, [{"ab": 1}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {"a": 1, "b": 2}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"const": "a"}}, [{"a": 1}, {}], [{"b": 1}]),
        (
            {
                "type": "object",
                "properties": {"a": INTEGER, "c": INTEGER},
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "string"},
            },
            [{"a": 1, "b": "x"}],
            [{"c": 1}, {"b": 1}],
        ),
    ],
)
def test_what_clients_write_is_taken(schema: Any, inside: list[Any], outside: list[Any]) -> None:
    for language in (Language(SCHEMA, schema), closed(schema)):
        for value in inside:
            assert json.dumps(value) in language
        for value in outside:
            assert json.dumps(value) not in language


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "format": "regex"}, "'format'"),
        ({"type": "string", "format": "json-pointer"}, "'format'"),
        ({"format": 5}, "'format'"),
        ({"nullable": "yes"}, "'nullable'"),
        ({"minLength": 2.5}, "'minLength'"),
        ({"propertyNames": 5}, "'propertyNames'"),
        ({"propertyNames": {"format": "uuid"}}, "'propertyNames'"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "'propertyNames'"),
        ({"propertyNames": {"pattern": "^a"}, "patternProperties": {"^b": {}}}, "'propertyNames'"),
        ({"propertyNames": {"not": {}}}, "'not'"),
    ],
)
def test_what_cannot_be_honoured_is_named(schema: Any, named: str) -> None:
    assert named in refusal(SCHEMA, schema)


def test_days_are_those_of_the_calendar() -> None:
    days, times = (Language(SCHEMA, {"type": "string", "format": name}) for name in ("date", "date-time"))
    bounded = Language(SCHEMA, {"type": "string", "format": "date", "pattern": "^2"})
    for year, leap in ((2023, False), (2024, True), (1900, False), (2000, True), (2100, False), (4, True)):
        text = f"{year:04}-02-29"
        assert (f'"{text}"' in days) == leap
        assert (f'"{text}T10:00:00Z"' in times) == leap
        assert (f'"{text}"' in bounded) == (leap and text.startswith("2"))
        for month in range(1, 13):
            last = (date(year, month, 28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)
            assert f'"{last.isoformat()}"' in days
            assert f'"{year:04}-{month:02}-{last.day + 1:02}"' not in days


@pytest.mark.parametrize("digits", [1, 9, 40])
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("date-time", "2024-02-29T10:00:00.", "Z"),
        ("date-time", "2023-12-31T23:59:60.", "+01:30"),
        ("time", "10:00:00.", "Z"),
        ("time", "10:00:00.", "-23:59"),
        ("duration", "P", "D"),
        ("duration", "P1Y2M3DT4H5M", "S"),
        ("duration", "P", "W"),
    ],
)
def test_numbers_in_formats_have_an_end(digits: int, kind: str, before: str, after: str) -> None:
    limits = ConstraintLimits(max_digits=digits)
    for more in ({}, {"pattern": "^[P0-9]"}):
        language = Language(SCHEMA, {"type": "string", "format": kind, **more}, limits=limits)
        assert f'"{before}{"7" * digits}{after}"' in language
        assert f'"{before}{"7" * (digits + 1)}{after}"' not in language
    whole = before.removesuffix(".") + (after if kind != "duration" else f"1{after}")
    assert f'"{whole}"' in language


def test_notes_are_left_out_where_a_schema_stands_and_nowhere_else() -> None:
    inner = {"title": "t", "type": "string"}
    schema = {
        "description": "d",
        "properties": {"title": inner, "x-y": inner, "default": inner},
        "items": [inner],
        "enum": [{"title": "t"}],
        "const": {"title": "t"},
        "x-guidance": {"title": "t"},
        "propertyNames": inner,
        "anyOf": [inner, True],
        "allOf": "title",
    }
    bare = {"type": "string"}
    assert without_notes(schema) == {
        "properties": {"title": bare, "x-y": bare, "default": bare},
        "items": [bare],
        "enum": [{"title": "t"}],
        "const": {"title": "t"},
        "x-guidance": {"title": "t"},
        "propertyNames": bare,
        "anyOf": [bare, True],
        "allOf": "title",
    }
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert without_notes(deep)["items"]


def test_notes_of_a_flood_of_schemas_are_left_in_it() -> None:
    flood = {"anyOf": [{"title": "t"}] * 50}
    assert without_notes(flood, parts=11) == {"anyOf": [{}] * 10 + [{"title": "t"}] * 40}
    assert without_notes(flood) == {"anyOf": [{}] * 50}
