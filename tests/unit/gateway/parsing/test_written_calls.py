"""A law of every format: calls as a model writes them are read as they were meant, however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.parsing.choice import TOOL_PARSERS, ParserChoice
from gateway.parsing.formats import FORMATS
from gateway.parsing.tags import tag_for, tagged_for
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import Call, Read, read_with
from tests.support.written_calls import BARE, SCHEMA, TYPES, WRITTEN

NAMES = ("look", "get_weather-2", "f")
HEADER = "<|start|>assistant"
LISTS = frozenset(
    {"llama3_json", "mistral", "pythonic", "granite", "phi4_mini_json", "apriel", "minimax", "nemotron_json"}
    | {"lfm2", "olmo3", "minimax_m2", "cohere_command3", "xlam", "json"}
)
"""Formats in which one marker stands in front of all calls."""
FRAMED = frozenset({"kimi_k2", "hy_v3", "openai"})
"""Formats with markers around calls, which are never text."""
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NASTY = st.text("ab\"'\\{}[]()<>/=,;:|\n\t \u00e9\u4e2d\U0001f600`", max_size=20)
ARGUMENTS = {
    "text": st.text(max_size=20) | NASTY,
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "nothing": st.none(),
    "items": st.lists(VALUES | NASTY, max_size=3),
    "fields": st.dictionaries(st.text(max_size=6) | NASTY, VALUES | NASTY, max_size=3),
}
assert ARGUMENTS.keys() == TYPES.keys()
CALLS = st.lists(
    st.builds(Call, st.sampled_from(NAMES), st.fixed_dictionaries({}, optional=ARGUMENTS)),
    min_size=1,
    max_size=3,
)


def chosen(name: str) -> ParserChoice:
    return ParserChoice(name, "", ToolSet(dict.fromkeys(NAMES, SCHEMA)))


def meant(read: Read) -> tuple[str, list[tuple[str, Any]]]:
    content, _, calls = read
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def read_pieces(name: str, text: str, cuts: list[int]) -> Read:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[first:last] for first, last in pairwise(places)]
    return read_with(chosen(name), HEADER, pieces)


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_was_meant_is_read(name: str, data: st.DataObject) -> None:
    calls = data.draw(CALLS)
    form = FORMATS.get(name)
    texts = [] if form is None else [text for text in form.texts if "<" in text]
    assume(
        not any(text in value for call in calls for value in [json.dumps(call.arguments)] for text in texts)
    )
    prose = "" if name in BARE else data.draw(st.sampled_from(["", "I will look. <b>2</b>"]))
    text = prose + WRITTEN[name](calls)
    whole = read_with(chosen(name), HEADER, [text])
    assert meant(whole) == (prose, [(call.name, call.arguments) for call in calls])
    assert read_with(chosen(name), HEADER, list(text)) == whole
    assert read_pieces(name, text, data.draw(st.lists(st.integers(0, 10_000), max_size=8))) == whole


@pytest.mark.parametrize("name", WRITTEN)
def test_a_cut_answer_has_the_beginning_of_the_calls(name: str) -> None:
    """And, once a call was told, no piece of a marker or of a further call as text."""
    arguments = {"text": 'a "b" \\ {c}\n', "items": [1, {"x": None}], "fields": {}, "flag": True}
    calls = [Call("look", arguments), Call("f", {}), Call("look", {"text": ""})]
    text = WRITTEN[name](calls)
    content, _, whole = read_with(chosen(name), HEADER, [text])
    assert (content, len(whole)) == ("", 3)
    for end in range(len(text)):
        content, _, cut = read_with(chosen(name), HEADER, [text[:end]])
        assert [called for called, _ in cut] == [called for called, _ in whole[: len(cut)]]
        for (_, some), (_, all_of_it) in zip(cut, whole, strict=False):
            assert all_of_it.startswith(some), text[:end]
        assert not (content and cut and name in LISTS), text[:end]
        assert text[:end].endswith(content)
        assert content == text[:end] or cut or name in FRAMED
        assert read_with(chosen(name), HEADER, list(text[:end])) == (content, "", cut)


def test_every_format_is_here() -> None:
    assert {FORMATS[name].name if name in FORMATS else name for name in TOOL_PARSERS | {"json"}} == set(
        WRITTEN
    )


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_a_format_writes_required_calls_in_its_own_way_or_as_an_array(name: str) -> None:
    """An array where its arguments are Python, or where a call has no marker but its bracket."""
    array = {"pythonic", "llama4_pythonic", "olmo3", "xlam"}
    own = tag_for(name, "f") is not None or tagged_for(name, "f") is not None
    assert own == (name not in array)
