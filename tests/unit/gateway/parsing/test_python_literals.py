"""Values of calls in Python's syntax: what is a literal is read, and a call with anything else is text."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing.json_text import whole
from gateway.parsing.python_text import python_value
from tests.support.parsed import Output, read

LITERALS = [
    '"""a\nb"""',
    "'''it's \"so\"'''",
    '""" one " two "" """',
    '""""""',
    "''",
    "'a' 'b'",
    "('a\\n'\n  \"b\" r'\\n')",
    "('a' 'b')",
    "r'\\d+\\'x'",
    'R"a\\n"',
    "u'a'",
    "'\\x41\\u00e9\\U0001F336\\101\\0\\a\\v'",
    "(1)",
    "(1,)",
    "()",
    "((1, 2), (3))",
    "[('a'), ('b',)]",
    "0x1F",
    "0b11",
    "-0o17",
    "1_000.5e-3",
    "{'a': (None, True), 'b': {}}",
]


@pytest.mark.parametrize("text", LITERALS)
def test_literals(text: str) -> None:
    expected = json.loads(json.dumps(ast.literal_eval(text)))
    found = whole(python_value, text)
    assert found is not None
    assert json.loads(found) == expected
    call = f"[place_order(comment={text}, items=[{text}])]"
    for pieces in ([call], list(call), [call[at : at + 3] for at in range(0, len(call), 3)]):
        content, _, ((name, arguments),) = read(Output("pythonic", call), pieces)
        assert (content, name) == ("", "place_order")
        assert json.loads(arguments) == {"comment": expected, "items": [expected]}


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_what_python_writes_is_read(value: object) -> None:
    found = whole(python_value, repr(value))
    assert found is not None
    assert json.loads(found) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        "f'a'",
        "b'a'",
        "'a' f'{b}'",
        "'\\N{DASH}'",
        "now()",
        "1 + 1",
        "a",
        "[1 2]",
        "{1, 2}",
        "(,)",
        "*x",
        "'a'.b",
    ],
)
def test_a_call_with_anything_else_is_text(value: str) -> None:
    for call in (f"[place_order(comment={value})]", f"[place_order(price=1, comment=[{value}])]"):
        for pieces in ([call], list(call)):
            assert read(Output("pythonic", call), pieces) == (call, "", [])


@pytest.mark.parametrize(
    "call",
    ["[get_weather('Paris')]", "[get_weather(city='Paris', 3)]", "[get_weather(city='a', city='b')]",
     "[get_weather(**{'city': 'a'})]", "[get_weather(city='Paris'}]", "[get_weather(city: 'Paris')]"],
)  # fmt: skip
def test_arguments_without_a_name_make_it_text(call: str) -> None:
    assert read(Output("pythonic", call), [call]) == (call, "", [])
    # Behind a good call too.
    both = f"[now(), {call[1:]}"
    content, _, calls = read(Output("pythonic", both), [both])
    assert (content, calls) == (both[len("[now()") :], [("now", "{}")])


def test_a_call_that_is_cut_keeps_what_it_has() -> None:
    call = "[get_weather(city='Paris', days=3)]"
    for cut in range(call.index("'") + 1, len(call) - 2):
        content, _, ((name, arguments),) = read(Output("pythonic", call), list(call[:cut]))
        assert (content, name) == ("", "get_weather")
        assert '{"city": "Paris", "days": 3}'.startswith(arguments)
