"""Laws: what a constraint allows satisfies it by another judge, and what satisfies it is allowed."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintError, ConstraintKind
from tests.support.constraints import Language

CHANCE = st.integers(0, 1000).map(random.Random)
WORDS = ("a", "b", "é", "心")
SCALARS: st.SearchStrategy[tuple[dict[str, Any], st.SearchStrategy[Any]]] = st.one_of(
    st.just(({"type": "null"}, st.none())),
    st.just(({"type": "boolean"}, st.booleans())),
    st.just(({"type": ["string", "null"], "maxLength": 3}, st.none() | st.text('aé心\n"\\', max_size=3))),
    st.integers(-40, 40).flatmap(
        lambda low: st.integers(low, low + 60).map(
            lambda high: ({"type": "integer", "minimum": low, "maximum": high}, st.integers(low, high))
        )
    ),
    st.lists(st.sampled_from([1, "x", None, True, "é", -3]), min_size=1, unique_by=repr).map(
        lambda values: ({"enum": values}, st.sampled_from(values))
    ),
    st.sampled_from(["^[a-c]{2}$", "b+", "^a?é"]).map(
        lambda pattern: (
            {"type": "string", "pattern": pattern},
            st.from_regex(pattern.replace("$", r"\Z"), alphabet=st.sampled_from("abcé")),
        )
    ),
)


def arrays(inner: Any) -> Any:
    def build(pair: Any, low: int) -> Any:
        schema, values = pair
        bounds = {"minItems": low, "maxItems": low + 2}
        return {"type": "array", "items": schema, **bounds}, st.lists(values, min_size=low, max_size=low + 2)

    return st.builds(build, inner, st.integers(0, 2))


def objects(inner: Any) -> Any:
    def build(pairs: dict[str, Any], required: list[str]) -> Any:
        names = [name for name in pairs if name in required]
        schema = {
            "type": "object",
            "properties": {name: pair[0] for name, pair in pairs.items()},
            "required": names,
            "additionalProperties": False,
        }
        # Properties come in the order of the schema.
        values = st.fixed_dictionaries(
            {name: pairs[name][1] for name in names},
            optional={name: pair[1] for name, pair in pairs.items() if name not in names},
        ).map(lambda value: {name: value[name] for name in pairs if name in value})
        return schema, values

    return st.builds(
        build, st.dictionaries(st.sampled_from(WORDS), inner, max_size=3), st.lists(st.sampled_from(WORDS))
    )


def choices(inner: Any) -> Any:
    return st.lists(inner, min_size=1, max_size=3).map(
        lambda pairs: ({"anyOf": [pair[0] for pair in pairs]}, st.one_of(*(pair[1] for pair in pairs)))
    )


SCHEMAS = st.recursive(SCALARS, lambda inner: arrays(inner) | objects(inner) | choices(inner), max_leaves=5)


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.data())
def test_json_schemas(pair: Any, data: st.DataObject) -> None:
    schema, values = pair
    language = Language(ConstraintKind.JSON_SCHEMA, schema)
    for _ in range(2):
        value = data.draw(values)
        assert json.dumps(value, ensure_ascii=False) in language
        assert json.dumps(value, ensure_ascii=False, indent=2) in language
        text = language.sample(data.draw(CHANCE).choice, most=120)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            assert text in language


ATOMS = st.sampled_from(
    ["a", "b", "é", ".", "[ab]", "[^a]", r"\d", r"\w", r"[\d_]", r"\D", r"\.", "(?:ab|b)", "[à-ü]", "/", '"']
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.data())
def test_regular_expressions(source: str, data: st.DataObject) -> None:
    language = Language(ConstraintKind.REGEX, source)
    judge = re.compile(source, re.ASCII)
    for text in (
        data.draw(st.from_regex(judge, fullmatch=True)),
        data.draw(st.text('abé1٣_./"\n', max_size=6)),
    ):
        assert (text in language) == (judge.fullmatch(text) is not None)
    sample = language.sample(data.draw(CHANCE).choice, most=40)
    if sample is not None:
        assert judge.fullmatch(sample)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gbnf_means_what_the_regular_expression_means(data: st.DataObject) -> None:
    """Rules and characters of GBNF against an expression of the same language."""
    word = '"a" | "b" [0-9]+ | [à-ü]'
    source = f'root ::= word ("," word){{0,2}} tail?\nword ::= {word}\ntail ::= "." | "," "."'
    judge = re.compile(r"(a|b[0-9]+|[à-ü])(,(a|b[0-9]+|[à-ü])){0,2}(\.|,\.)?")
    language = Language(ConstraintKind.GBNF, source)
    for text in (data.draw(st.from_regex(judge, fullmatch=True)), data.draw(st.text("ab1é,.", max_size=8))):
        assert (text in language) == (judge.fullmatch(text) is not None)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(ConstraintKind)),
    st.text(max_size=60) | st.text('(){}[]|*+?\\"/:=<>%a0 \n', max_size=60),
)
def test_no_text_is_more_than_refused(kind: ConstraintKind, source: str) -> None:
    with suppress(ConstraintError):
        Language(kind, source)
