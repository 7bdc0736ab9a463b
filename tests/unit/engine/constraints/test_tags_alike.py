"""A law of structural tags: both libraries allow the same texts, whatever the tag says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from services.engine.constraints import ConstraintRefused, GuidanceBackend, open_xgrammar
from services.engine.constraints.vocabulary import Grammar, GrammarBackend
from services.engine.domain import ConstraintOptions
from tests.support.constrained import tiny_vocabulary
from tests.support.tiny_tokenizer import byte_ids

pytest.importorskip("xgrammar")

VOCABULARY = tiny_vocabulary()
BACKENDS: Mapping[str, GrammarBackend] = {
    "llguidance": GuidanceBackend(VOCABULARY, 1),
    "xgrammar": open_xgrammar(VOCABULARY, 1),
}
_PAIR = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}
# Of strings' escapes, llguidance writes those alone that JSON demands, and xgrammar any.
# A schema, values that it allows and others. None: any text.
CONTENTS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "boolean"}, ["true", " false"], ["1", "True"]),
    ({"type": "integer"}, ["12", "-3"], ["x", "01", "1."]),
    ({"type": "number"}, ["-1.5e3"], [".5", "+1"]),
    ({"const": "a<b"}, ['"a<b"'], ['"a"']),
    ({"enum": ["x", None]}, ["null", '"x"'], ['"y"']),
    ({"type": "string"}, ['"</t> \\" { \u00e9"'], ['"\n"', '"\\x"', "'a'"]),
    (_PAIR, ['{"a": "x", "b": [1, 2]}', '{"a":""}', '{ "a":\n"x" }'], ['{"b": []}', '{"a": "", "c": 1}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
    ({"type": "object", "properties": {"a": {}}}, ['{"a": 1}', '{"a": 1, "z": 2}'], ['{"a"}']),
    ({"type": "object"}, ["{}", '{"a": [null]}'], ["[]", "{,}"]),
    (
        {"type": "array", "items": {}, "minItems": 1},
        ["[1]", "[" + " " * 32 + "1]"],
        ["[]", "[" + " " * 33 + "1]"],
    ),
    (None, ["any <b> text", ""], ["any text", "{"]),
]
BEGINS = ("<t>", "<t=a>", "<u>", "<call>\n")
ENDS = ("</t>", "\n</u>", ")")


@st.composite
def tags(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A structural tag, and pieces of texts that it may allow."""
    structures, pieces = [], ["", " ", "\n", " \n", "\n\n\n", ",", "Hello", "<", "<t", "true", '{"a": 1}']
    begins = draw(st.lists(st.sampled_from(BEGINS), min_size=1, max_size=3, unique=True))
    for begin in begins:
        schema, good, bad = draw(st.sampled_from(CONTENTS))
        structure = {"begin": begin, "end": draw(st.sampled_from(ENDS))}
        structures.append(structure if schema is None else structure | {"schema": schema})
        whole = [begin + value + structure["end"] for value in good]
        pieces += [*whole, *whole, *(begin + value + structure["end"] for value in bad), whole[0][:-1], begin]
    triggers = {begin: draw(st.sampled_from([begin, "<t", "<"])) for begin in begins}
    kept = {trigger if begin.startswith(trigger) else begin for begin, trigger in triggers.items()}
    source: dict[str, Any] = {"structures": structures, "triggers": sorted(kept)}
    for flag in ("at_least_one", "stop_after_first"):
        if draw(st.booleans()):
            source[flag] = True
    match draw(st.sampled_from(["free", "only", "otherwise"])):
        case "only":
            source |= {"only_tags": True, "at_least_one": True}
        case "otherwise":
            schema, good, bad = draw(st.sampled_from([one for one in CONTENTS if one[0] is not None]))
            source["otherwise"] = schema
            pieces += [*good, *good, *bad]
    return source, pieces


def compiled(backend: GrammarBackend, source: dict[str, Any], *, closed: bool) -> Grammar:
    options = ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, json.dumps(source), closed=closed)
    return backend.compile(options)


def allows(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.accept(byte_ids(text)) and matcher.accepting


TAG = {"begin": "<t>", "schema": {"type": "integer"}, "end": "</t>"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_tags_or_a_value(backend: str) -> None:
    """Without a tag, the answer is JSON of the other schema, and no text."""
    source = {"triggers": ["<t", "<"], "structures": [TAG], "otherwise": {"enum": ["x", 5]}}
    either = compiled(BACKENDS[backend], source, closed=True)
    must = compiled(BACKENDS[backend], source | {"at_least_one": True}, closed=True)
    one = compiled(BACKENDS[backend], source | {"stop_after_first": True}, closed=True)
    for text, allowed in {
        "<t>1</t>": (True, True, True),
        "<t>1</t>\n<t>2</t>": (True, True, False),
        "5": (True, False, True),
        '"x"': (True, False, True),
        "5<t>1</t>": (False, False, False),
        "<t>1</t>5": (False, False, False),
        "<t>1</t> done": (False, False, False),
        "Hello": (False, False, False),
        "": (False, False, False),
    }.items():
        assert tuple(allows(grammar, text) for grammar in (either, must, one)) == allowed, text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trigger_that_begins_another_one_fires_first(backend: str) -> None:
    source = {"triggers": ["<", "<t>", "<"], "structures": [TAG]}
    grammar = compiled(BACKENDS[backend], source, closed=True)
    assert [allows(grammar, text) for text in ("a <t>1</t> b", "a < b", "<t>x</t>")] == [True, False, False]
    inner = {"triggers": ["<t>", "t>"], "structures": [TAG, TAG | {"begin": "t>"}]}
    with pytest.raises(ConstraintRefused, match="must not hold another"):
        compiled(BACKENDS[backend], inner, closed=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_objects_of_tags_are_open_unless_they_are_to_be_closed(backend: str) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {"type": "object", "properties": {"c": {}}}}}
    source = {"structures": [TAG | {"schema": schema}], "triggers": ["<t>"]}
    for closed in (True, False):
        grammar = compiled(BACKENDS[backend], source, closed=closed)
        assert allows(grammar, '<t>{"a": 1, "b": {"c": 2}}</t>')
        for value in ('{"a": 1, "z": 2}', '{"z": 2}', '{"a": 1, "b": {"z": 2}}'):
            assert allows(grammar, f"<t>{value}</t>") != closed


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_libraries_allow_the_same(data: st.DataObject) -> None:
    source, pieces = data.draw(tags())
    closed = data.draw(st.booleans())
    grammars = {name: compiled(backend, source, closed=closed) for name, backend in BACKENDS.items()}
    for _ in range(12):
        text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=4)))
        found = {name: allows(grammar, text) for name, grammar in grammars.items()}
        assert len(set(found.values())) == 1, (json.dumps(source), text, found)
