"""Calls of formats that write each argument in a tag: what a grammar allows satisfies the schema."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from catenary.text import TokenizerTraits
from gateway.constraints import CallableFunction, wanted_calls
from gateway.errors import ApiError
from gateway.generation.chat import choose_constraint, choose_parser
from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import Content, ToolCallArguments, ToolCallStart
from gateway.parsing.toolset import ToolSet
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from tests.support.constraints import Language

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "b"]}},
}
LOOK = CallableFunction("look", SCHEMA, strict=True)
NOW = CallableFunction("now", None, strict=True)
LOOSE = CallableFunction("loose", {"type": "object", "properties": {"x": {"type": "integer"}}})
QWEN = (
    "<tool_call>\n<function=look>\n<parameter=city>\n%s\n</parameter>\n"
    "<parameter=days>\n%s\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function=look>\n<parameter=city>%s</parameter>\n<parameter=days>%s</parameter>\n"
    "</function>\n</seed:tool_call>"
)
M2 = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">%s</parameter>\n'
    '<parameter name="days">%s</parameter>\n</invoke>\n</minimax:tool_call>'
)
HY = (
    "<tool_call:opensource>look<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>%s</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>%s</arg_value:opensource>\n"
    "</tool_call:opensource>"
)
FORMATS = {"qwen3_coder": QWEN, "glm45": GLM, "seed_oss": SEED, "minimax_m2": M2, "hy_v3": HY}
BOTH = pytest.mark.parametrize("parser", FORMATS)


def language(*functions: CallableFunction, parser: str, **options: Any) -> Language:
    wanted = wanted_calls(functions, parser, **{"required": False, "single": False, **options})
    assert wanted is not None
    return Language(ConstraintKind(wanted.kind), wanted.source)


def read(parser: str, text: str, *functions: CallableFunction) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and calls with their arguments, as the parser reads them."""
    tools = ToolSet({function.name: function.schema for function in functions})
    reader = ParserChoice(parser, "", tools).parser("")
    content, calls = "", list[tuple[str, str]]()
    for part in [*reader.feed(text), *reader.finish()]:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, ToolCallStart):
            calls.append((part.name, ""))
        elif isinstance(part, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@BOTH
def test_what_is_allowed(parser: str) -> None:
    call = FORMATS[parser]
    free = language(LOOK, NOW, parser=parser)
    must = language(LOOK, NOW, parser=parser, required=True)
    one = language(LOOK, NOW, parser=parser, required=True, single=True)
    good = call % ("S\u00e3o\n Paulo ", "12")
    assert read(parser, good, LOOK) == ("", [("look", {"city": "S\u00e3o\n Paulo ", "days": 12})])
    for text, auto, required, single in (
        (good, True, True, True),
        ("Well: " + good, True, False, False),
        ("no call", True, False, False),
        (good + "\n" + good, True, True, False),
        (good + " and " + good, True, False, False),
        (call % ("Paris", "100"), False, False, False),
        (call % ("Paris", '"5"'), False, False, False),
        (call % (call.rpartition("\n")[2], "5"), False, False, False),
        (call.replace("look", "see") % ("Paris", "5"), False, False, False),
        (call.replace("days", "hours") % ("Paris", "5"), False, False, False),
    ):
        assert [text in one_of for one_of in (free, must, one)] == [auto, required, single], text


class Chooser:
    """Chooses bytes at random, but ends texts before long."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._ending: list[int] = []

    def __call__(self, allowed: list[int]) -> int:
        if self._ending and self._ending[0] in allowed:
            return self._ending.pop(0)
        self._ending = []
        if len(allowed) > 100 and self._random.random() < 0.4:
            self._ending = [
                *self._random.choice(
                    (b"\n</parameter>\n", b"</arg_value>\n", b"</arg_value:opensource>\n", b"\n<")
                )
            ]
            return self(allowed)
        return self._random.choice([token for token in allowed if token < 128] or allowed)


@BOTH
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_all_that_is_allowed_satisfies_the_schema(parser: str, data: st.DataObject) -> None:
    allowed = language(LOOK, NOW, parser=parser, required=True, single=True)
    seed = data.draw(st.randoms(use_true_random=False))
    text = allowed.sample(Chooser(seed))
    assume(text is not None)
    assert text is not None
    content, calls = read(parser, text, LOOK, NOW)
    assert content == ""
    ((name, arguments),) = calls
    jsonschema.validate(arguments, LOOK.schema if name == "look" else NOW.schema)


@BOTH
def test_other_functions_stay_free(parser: str) -> None:
    found = language(LOOK, LOOSE, parser=parser)
    call = FORMATS[parser].replace("look", "loose")
    assert call % ("anything", "at all") in found
    assert FORMATS[parser] % ("Paris", "x") not in found


@BOTH
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": "a+"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "enum": ["a", ""]},
        {"enum": ["1", 1]},
        {"enum": ["5", 5, None]},
        {"enum": [f"</{tag}>" for tag in ("tool_call", "seed:tool_call", "invoke", "tool_call:opensource")]},
        {"$ref": "#/$defs/name"},
        {"minimum": 3},
        False,
    ],
)
def test_what_texts_cannot_be_held_to(parser: str, part: Any) -> None:
    schema = {"type": "object", "properties": {"a": part}, "$defs": {"name": {"type": "string"}}}
    odd = CallableFunction("odd", schema, strict=True)
    with pytest.raises(ApiError) as caught:
        language(odd, parser=parser)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    if part is not False:
        # A call that is required is written as JSON then.
        assert language(odd, parser=parser, required=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "patternProperties": {"a": {}}},
        {"anyOf": [{"type": "object"}]},
        {"type": "object", "properties": {"a>b": {"type": "integer"}}},
        {"type": "object", "minProperties": 1},
    ],
)
def test_schemas_that_say_more_than_values(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        language(CallableFunction("odd", schema, strict=True), parser="qwen3_coder")


@BOTH
def test_required_calls_are_read_as_they_are_written(parser: str) -> None:
    traits = TokenizerTraits(tool_parser=parser)

    def chosen(schema: dict[str, Any]) -> str:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
        fields = parse_request(ChatRequest, {**body, "tool_choice": "required"}, RequestLimits())
        wanted = choose_constraint(fields, traits)
        assert wanted is not None
        name = choose_parser(fields, traits).tool_parser
        assert (name == parser) == (ConstraintKind(wanted.kind) is ConstraintKind.STRUCTURAL_TAG)
        return name

    assert chosen(SCHEMA) == parser
    assert chosen({"properties": {"a": {"type": "string", "pattern": "a"}}}) == "json"
