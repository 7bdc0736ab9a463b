"""A Lark grammar before it is compiled: its size, its nesting, and the JSON schemas in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder

from catenary.constraints.json_schema import clean_schema
from catenary.constraints.kinds import ConstraintError, ConstraintLimits
from catenary.constraints.regex import read_regex

# One token; what is in none of these is one character. None can backtrack, and none is tried twice at one
# text: a quote or a slash that is not closed is refused.
_TOKEN = re.compile(
    r'(?P<comment>(?://|\#)[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)'
    r"|(?P<directive>%[a-z]+)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<repetition>\{[0-9, ]*\}|~[0-9. ]+)"
    r"|(?P<special><[^<>\n]*>)|(?P<other>[\s\S])"
)
_OPEN = ('"', "/")
# Lark takes any character but a line break in a text; llguidance takes control characters escaped alone.
_CONTROL = re.compile(r"\\.|[\x00-\x1f\x7f]")
_NUMBER = re.compile(r"[0-9]+")


def read_lark(source: str, limits: ConstraintLimits) -> str:
    """Return the grammar for llguidance: as it is, but for the JSON schemas (`%json {...}`) and the character
    classes in it.

    Raises:
        ConstraintError: it is empty, too large, nested too deep, or a part cannot be honoured. Names without
            a rule and faults of syntax show when it is compiled.
    """
    if not source.strip():
        raise ConstraintError("The grammar must not be empty.")
    return "".join(_read(source, limits))


def lark_text(text: str) -> str:
    """Return a text as llguidance's Lark writes one: a JSON string whose DEL is escaped too."""
    return _CONTROL.sub(_escaped, json.dumps(text, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    """Return a control character as an escape; an escape stays as it is."""
    return found[0] if found[0].startswith("\\") else f"\\u{ord(found[0]):04x}"


def _read(source: str, limits: ConstraintLimits) -> Iterator[str]:
    position, depth, rules = 0, 0, 0
    while position < len(source):
        found = _TOKEN.match(source, position)
        if found is None or found[0] in _OPEN:
            raise ConstraintError("The grammar has a text or a regular expression that is not closed.")
        kind, text = found.lastgroup, found[0]
        position = found.end()
        if kind == "directive" and text == "%json":
            schema, position = _schema(source, position, limits)
            text = f"%json {schema}"
        elif kind == "string":
            text = _CONTROL.sub(_escaped, text)
        elif kind == "regex":
            end = text.rindex("/")
            text = f"/{read_regex(text[1:end], limits)}{text[end:]}"
        elif kind == "repetition" and any(
            len(number) > 9 or int(number) > limits.max_regex_size for number in _NUMBER.findall(text)
        ):
            raise ConstraintError(f"The grammar repeats something more than {limits.max_regex_size} times.")
        elif text in "([":
            depth += 1
        elif text in ")]":
            depth -= 1
        elif text == ":":
            rules += 1
        if depth > limits.max_depth:
            raise ConstraintError(f"The grammar is nested deeper than {limits.max_depth} groups.")
        if rules > limits.max_rules:
            raise ConstraintError(f"The grammar has more than {limits.max_rules} rules.")
        yield text


def _schema(source: str, position: int, limits: ConstraintLimits) -> tuple[str, int]:
    """Return the JSON behind `%json`, cleaned, and the index behind it."""
    while source[position : position + 1].isspace():
        position += 1
    try:
        schema, end = JSONDecoder().raw_decode(source, position)
    except (JSONDecodeError, RecursionError):
        raise ConstraintError("A JSON schema in the grammar is not valid JSON.") from None
    return json.dumps(clean_schema(schema, limits), ensure_ascii=False), end
