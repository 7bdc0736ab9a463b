"""A value that an option does not take, in a sentence: what was expected, with every limit.

The words follow from the option's declaration, not from pydantic's, which say half of it: that a text is no
number, but not which numbers there may be.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from catenary.config.settings import is_list, is_secret
from catenary.nearest import near

# What a value is shown with at most.
MAX_SHOWN: Final = 100
# Letters in common: higher than elsewhere, since "gpu" is no misspelt "cpu".
_NEAR_VALUE: Final = 0.7
# What other programs call values of ours.
_ELSEWHERE: Final = {
    "gpu": "cuda",
    "gaudi": "hpu",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "warn": "warning",
    "console": "text",
}
# In a URL.
_PASSWORD: Final = re.compile(r"://[^/@\s]*@")
_COUNTED: Final = ("too_short", "too_long", "missing")
_LENGTHS: Final = ("string_too_short", "string_too_long")


def shown(name: str, field: FieldInfo | None, value: Any) -> str:
    """Return a value as messages show it, with a blank before it; empty for a secret and for no value."""
    if value is None or field is None or is_secret(name, field):
        return ""
    text = _PASSWORD.sub("://...@", repr(str(value) if isinstance(value, Path) else value))
    return f" {text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + '...'}"


def reason(name: str, field: FieldInfo | None, problem: ErrorDetails) -> str:
    """Return what is wrong with the value of the option `name`, one line that follows the value."""
    kind = problem["type"]
    if field is None or kind in ("value_error", "assertion_error"):
        text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return " ".join(text.split())
    value = problem["input"]
    of_entry = len(problem["loc"]) > 1
    if is_list(field) and (not of_entry or kind == "missing"):
        return f"expected {_entries(field)}{_found_entries(kind, value)}"
    expected = f"expected {_one(field, finite=kind == 'finite_number')}"
    if of_entry:
        expected += " for each entry"
        if not is_secret(name, field):
            expected += f", not{shown(name, field, value)}"
    if kind in _LENGTHS:
        return f"{expected}, not {len(value)}"
    if kind == "int_parsing_size":
        return f"{expected}, of at most {sys.get_int_max_str_digits()} digits"
    return expected + _hint(field, value)


def expected_one_of(word: str, choices: Iterable[str]) -> str:
    """Return what is wrong with a word that is none of the choices, one line that follows the word."""
    known = list(choices)
    return f"expected {_either(known)}{_meant(word, known)}"


def _one(field: FieldInfo, *, finite: bool = False) -> str:
    """Return the values that may be given: `a whole number from 0 to 65535`."""
    kind, rules = _scalar(field)
    if choices := _choices(kind):
        return _either(choices)
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        number = "a whole number" if kind is int else "a finite number" if finite else "a number"
        return number + _range(rules)
    if kind is Path:
        return "a path"
    least, most, pattern = (_rule(rules, name) for name in ("min_length", "max_length", "pattern"))
    if pattern is not None:
        examples = field.examples or [pattern]
        return f"a text such as {_either([str(example) for example in examples])}"
    return f"a text{_count(least, most, 'character')}"


def _entries(field: FieldInfo) -> str:
    """Return the lists that may be given: `a list of 1 to 16 entries, divided by commas`."""
    exactly = [arg for arg in get_args(field.annotation) if arg is not Ellipsis]
    if len(exactly) > 1 and Ellipsis not in get_args(field.annotation):
        return f"{len(exactly)} entries, divided by commas"
    least, most = (_rule(field.metadata, name) for name in ("min_length", "max_length"))
    return f"a list{_count(least, most, 'entry')}, divided by commas"


def _found_entries(kind: str, value: Any) -> str:
    if kind not in _COUNTED:
        return ""
    return f", not {len(value)}" if isinstance(value, list | tuple | set | frozenset) else ", not fewer"


def _scalar(field: FieldInfo) -> tuple[Any, list[Any]]:
    """Return the type of one value, and its rules: those of a list's entries stand in its annotation."""
    rules = [] if is_list(field) else list(field.metadata)
    pending: list[Any] = [field.annotation]
    kinds: list[Any] = []
    while pending:
        kind = pending.pop(0)
        if isinstance(kind, FieldInfo):
            rules += kind.metadata
        elif get_origin(kind) is Literal or not get_args(kind):
            kinds.append(kind)
        else:
            pending += get_args(kind)
    known = (bool, int, float, str, Path)
    wanted = [kind for kind in kinds if kind in known or _choices(kind)]
    return (wanted[0] if wanted else str), rules


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return []


def _rule(rules: list[Any], name: str) -> Any:
    return next((found for rule in rules if (found := getattr(rule, name, None)) is not None), None)


def _range(rules: list[Any]) -> str:
    least, above, most, below = (_rule(rules, name) for name in ("ge", "gt", "le", "lt"))
    low = (
        f"above {_number(above)}"
        if above is not None
        else f"from {_number(least)}"
        if least is not None
        else ""
    )
    if low and most is not None:
        return f" {low} {'to' if least is not None else 'and at most'} {_number(most)}"
    if low and below is not None:
        return f" {low} {'to' if least is not None else 'and'} below {_number(below)}"
    if low:
        return f" {low.replace('from', 'of at least')}"
    return (
        f" of at most {_number(most)}"
        if most is not None
        else f" below {_number(below)}"
        if below is not None
        else ""
    )


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _count(least: int | None, most: int | None, noun: str) -> str:
    """Return the number that may be given: ` of 1 to 16 entries`."""
    nouns = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    if least and most is not None:
        return f" of {least} to {most} {nouns}"
    if most is not None:
        return f" of at most {most} {noun if most == 1 else nouns}"
    if least is not None:
        return f" of at least {least} {noun if least == 1 else nouns}"
    return f" of {nouns}" if noun == "entry" else ""


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _hint(field: FieldInfo, value: Any) -> str:
    kind, _ = _scalar(field)
    choices = _choices(kind)
    if isinstance(value, str):
        return _meant(value, choices)
    # YAML takes off, no and 010 without quotes for something else than a text.
    quotable = kind is str or (isinstance(value, bool) and not {"on", "off", "yes", "no"}.isdisjoint(choices))
    return " (write it in quotes)" if quotable and isinstance(value, bool | int | float) else ""


def _meant(word: str, choices: list[str]) -> str:
    elsewhere = _ELSEWHERE.get(word.strip().lower(), "")
    if elsewhere in choices:
        return f" (did you mean {elsewhere}?)"
    return near(word.strip(), choices, likeness=_NEAR_VALUE, quoted=False)
