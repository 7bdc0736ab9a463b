"""Numbers of constrained JSON have an end, and names stand once in their objects."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from services.engine.constraints import ConstraintCompiler, GuidanceBackend, Restriction, Taken, open_xgrammar
from services.engine.constraints.json_watch import JsonParts, JsonTokens, JsonWatch, json_parts
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.domain import ConstraintOptions
from tests.support.constrained import WIDTH, next_tokens, regex, schema, tiny_vocabulary
from tests.support.tiny_tokenizer import EOS_ID, byte_ids

WAIT_S = 60.0
VOCABULARY = tiny_vocabulary()
END = frozenset({EOS_ID})
DIGITS = 40
NUMBER = r"[0-9]{40}(\.[0-9]{40})?([eE][0-9]{3})?"


@pytest.fixture(params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest) -> Any:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    make = {"llguidance": GuidanceBackend, "xgrammar": open_xgrammar}[request.param]
    made = ConstraintCompiler(
        make(VOCABULARY, 1),
        VOCABULARY,
        threads=1,
        queue=9,
        cached=9,
        cached_bytes=1 << 20,
        number_digits=DIGITS,
    )
    yield made
    made.close()


def written(compiler: ConstraintCompiler, options: ConstraintOptions, choose: Any, begin: str = "") -> str:
    """The text of a sequence that begins so, up to its end or for 400 tokens."""
    one = Restriction(compiler.compile(options, lambda: None).result(WAIT_S), END)
    text = begin.encode()
    for token in byte_ids(begin):
        assert one.take(token) is Taken.GOES_ON
    for _ in range(400):
        token = choose(next_tokens(one, compiler.backend, VOCABULARY))
        if one.take(token) is Taken.ENDED:
            break
        text += VOCABULARY.text(token)
    return text.decode()


def likes(pattern: str) -> Any:
    """Chooses a token whose text matches, if there is one."""

    def choose(allowed: list[int]) -> int:
        wanted = [token for token in allowed if re.fullmatch(pattern.encode(), VOCABULARY.text(token))]
        return (wanted or allowed)[-1]

    return choose


@pytest.mark.parametrize(
    ("value", "begin", "expected"),
    [
        ({}, "", NUMBER),
        ({"type": "integer"}, "-", r"-[0-9]{40}"),
        ({"type": "number"}, "1.", r"1\.[0-9]{40}([eE][0-9]{3})?"),
        ({"type": "number"}, "1.5e", r"1\.5e[0-9]{3}"),
        ({"type": "number"}, "1E-", r"1E-[0-9]{3}"),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 2}, "[1,", rf"\[1,\s*{NUMBER}\s*\]"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            '{"0":',
            r'\{"0":\s*[0-9]{40}\s*.*',
        ),
    ],
)
def test_a_model_that_likes_digits_comes_to_an_end(
    compiler: Any, value: Any, begin: str, expected: str
) -> None:
    assert re.fullmatch(expected, written(compiler, schema(value), likes("[0-9]+"), begin), re.DOTALL)


def test_numbers_that_are_bounded_by_their_schema_are_bounded_too(compiler: Any) -> None:
    bounded = {"type": "integer", "minimum": 7}
    assert re.fullmatch("[0-9]{1,40}", written(compiler, schema(bounded), likes("[0-9]+")))


def test_what_must_be_written_is_written(compiler: Any) -> None:
    long = "1" * 60
    assert written(compiler, schema({"const": {"a": long}}), max).replace(" ", "").count("1") == 60
    assert written(compiler, regex("[0-9]{50}"), max) != ""
    assert len(written(compiler, regex("[0-9]{50}"), max)) == 50
    assert len(written(compiler, schema({"type": "string"}), likes("[0-9]+"), '"')) > 100


def test_digits_of_text_around_json_are_free() -> None:
    compiler = ConstraintCompiler(
        GuidanceBackend(VOCABULARY, 1), VOCABULARY, threads=1, queue=9, cached=9, cached_bytes=1 << 20
    )
    tag = {
        "triggers": ["[f]"],
        "structures": [{"begin": "[f]", "schema": {"type": "integer"}, "end": "[/f]"}],
    }
    options = ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))
    assert len(written(compiler, options, likes("[0-9]+"))) >= 400
    assert re.fullmatch(
        r"1\[f\][0-9]{40}\[/f\].+", written(compiler, options, likes("[0-9]+"), "1[f]"), re.DOTALL
    )
    grammar = ConstraintOptions(ConstraintKind.GRAMMAR, 'start: "[" %json {"type": "integer"} "]"')
    assert re.fullmatch(r"\[[0-9]{40}\]", written(compiler, grammar, likes("[0-9]+")))
    compiler.close()


FREE = {"type": "object", "additionalProperties": {"enum": [1, 2]}}


def pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names)
    return dict(pairs)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_name_is_not_repeated_in_an_object(chance: Any) -> None:
    compiler = ConstraintCompiler(
        GuidanceBackend(VOCABULARY, 1), VOCABULARY, threads=1, queue=9, cached=9, cached_bytes=1 << 20
    )
    value = {"type": "object", "additionalProperties": FREE, "minProperties": 3, "maxProperties": 4}

    def choose(allowed: list[int]) -> int:
        wanted = [token for token in allowed if re.fullmatch(rb'[ab{}",:12]+', VOCABULARY.text(token))]
        return int(chance.choice(wanted or allowed))

    text = written(compiler, schema(value), choose)
    compiler.close()
    try:
        json.loads(text)
    except ValueError:
        return
    assert len(json.loads(text, object_pairs_hook=pairs_once)) >= 3


WHOLE = JsonParts(whole=True)


def watched(text: str, parts: JsonParts = WHOLE) -> set[int]:
    """Tokens that may not follow this text."""
    watch = JsonWatch(parts, JsonTokens(VOCABULARY, DIGITS))
    for token in byte_ids(text):
        watch.feed(VOCABULARY.text(token))
    bits = watch.forbidden()
    return set() if bits is None else {i for i in range(WIDTH) if bits[i // 32] >> i % 32 & 1}


QUOTE, DIGIT = byte_ids('"')[0], byte_ids("7")[0]


class _Words(Vocabulary):
    """Only the texts of tokens."""

    def __init__(self, *texts: bytes) -> None:
        self.texts, self.width = list(texts), len(texts)

    @property
    def words(self) -> int:
        return 1


def test_a_token_that_was_only_tried_adds_no_name() -> None:
    words = _Words(b'"b":1,"a"', b'"b":{"a"', b'},"a"', b'"a"', b'"')
    watch = JsonWatch(WHOLE, JsonTokens(words, DIGITS))

    def forbidden() -> int:
        bits = watch.forbidden()
        return 0 if bits is None else int(bits[0])

    watch.feed(b'{"a":{"c":1')
    assert forbidden() == 0b00100
    watch.feed(b"},")
    assert forbidden() == forbidden() == 0b01001
    watch.feed(b'"b')
    assert forbidden() == 0


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ('{"a":1,"a', True),
        ('{"a":1,"b', False),
        ('{"a":1,"', False),
        ('{"a":{"a', False),
        ('{"a":{"b":1},"a', True),
        ('{"a":["a","a', False),
        ('[{"a":1},{"a', False),
        ('{"x":"a","a', False),
        ('{"a\\"":1,"a\\"', True),
        ('{"a\\"":1,"a', False),
        ('{"a":"\\"a","a', True),
        ('{ "a" : 1 , "a', True),
        ('{"é":1,"é', True),
        ('{"":1,"', True),
    ],
)
def test_a_quote_may_not_end_a_name_that_the_object_has(text: str, forbidden: bool) -> None:
    assert (QUOTE in watched(text)) == forbidden


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("7" * 39, False),
        ("7" * 40, True),
        ("-" + "7" * 40, True),
        ("7" * 40 + ".", False),
        ("0." + "7" * 40, True),
        ("1e777", True),
        ("1e77", False),
        ("1e+777", True),
        ("[" + "7" * 40 + ",", False),
        ('"' + "7" * 60, False),
        ('{"' + "7" * 60 + '":' + "7" * 40, True),
        ('["\\"",' + "7" * 40, True),
        ("true, " + "7" * 40, True),
    ],
)
def test_a_digit_may_not_follow_as_many_as_there_may_be(text: str, forbidden: bool) -> None:
    assert (DIGIT in watched(text)) == forbidden


def test_json_begins_behind_what_a_tag_begins_with_and_ends_with_what_is_none() -> None:
    parts = JsonParts(("<f>", "<g> "))
    many = "7" * 40
    for text, forbidden in (
        (many, False),
        ("<f>" + many, True),
        ("x <f>" + many, True),
        ("<f" + many, False),
        ("<g> " + many, True),
        ("<f>1</f>" + many, False),
        ("<f>1</f><g> " + many, True),
        ('<f>"</f>', False),
        ("it's \"so <f>" + many, True),
    ):
        assert (DIGIT in watched(text, parts)) == forbidden, text


def test_where_the_texts_of_a_constraint_are_json() -> None:
    tag = {
        "triggers": ["<"],
        "structures": [
            {"begin": "<a>", "schema": {}, "end": "</a>"},
            {"begin": "<b>", "end": "</b>"},
            {
                "begin": "<c>",
                "end": "</c>",
                "parameters": [
                    {"begin": "<p>", "end": "</p>", "schema": True},
                    {"begin": "<q>", "end": "</q>"},
                ],
            },
        ],
    }
    kinds = ConstraintKind
    assert json_parts(schema({})) == JsonParts(whole=True)
    assert json_parts(ConstraintOptions(kinds.STRUCTURAL_TAG, json.dumps(tag))) == JsonParts(("<a>", "<p>"))
    otherwise = json.dumps({**tag, "otherwise": {}})
    assert json_parts(ConstraintOptions(kinds.STRUCTURAL_TAG, otherwise)) == JsonParts(
        ("<a>", "<p>"), whole=True
    )
    assert json_parts(ConstraintOptions(kinds.GRAMMAR, "start: %json {}")) == JsonParts(whole=True)
    assert json_parts(ConstraintOptions(kinds.GRAMMAR, "start: /a/")) is None
    assert json_parts(ConstraintOptions(kinds.GBNF, 'root ::= "a"')) is None
    assert json_parts(regex("a")) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\é', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON_VALUES, st.data())
def test_no_other_json_is_forbidden(value: Any, data: st.DataObject) -> None:
    """However its text is cut into tokens."""
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode()
    watch = JsonWatch(JsonParts(whole=True), JsonTokens(VOCABULARY, 400))
    while text:
        longest = [token for token in TOKENS if text.startswith(VOCABULARY.texts[token])]
        token = data.draw(st.sampled_from(longest))
        bits = watch.forbidden()
        assert bits is None or not bits[token // 32] >> token % 32 & 1
        watch.feed(VOCABULARY.texts[token])
        text = text[len(VOCABULARY.texts[token]) :]


TOKENS = [i for i, text in enumerate(VOCABULARY.texts) if text and i not in VOCABULARY.control_ids]
