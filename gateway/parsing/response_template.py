"""A checkpoint's declarative response template (transformers' `response_template`) as formats of ours.

It is used only if formats.py can express all that it says of calls and reasoning; else the parsers are those
that the chat template implies. Its regular expressions are never run on a model's text: each is translated to
a format, or the template is not used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from gateway.parsing.formats import (
    CallList,
    CallObject,
    JsonArguments,
    Literal,
    PythonCalls,
    Step,
    TaggedArguments,
    ToolFormat,
    Word,
    WordKind,
)
from gateway.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class Group:
    name: str


@dataclass(frozen=True, slots=True)
class Space:
    """Optional white space."""


Item: TypeAlias = str | Group | Space

_GROUP = re.compile(r"\(\?P<(\w+)>(?:\[[^\]]*\]|\\w|\.)[*+]\??\)")
_SPACE = re.compile(r"\\s[*+]\??")
_ESCAPED = re.compile(r"\\([^\w\s])|\\(n)|\\(t)")
_PLAIN = re.compile(r"[^\\()\[\]{}.*+?|^$]+")


def read_pattern(pattern: str) -> list[Item] | None:
    """Split a pattern into literal texts, named groups that match anything, and white space; None if it has
    anything else."""
    items: list[Item] = []
    position = 0
    while position < len(pattern):
        if match := _GROUP.match(pattern, position):
            items.append(Group(match[1]))
        elif match := _SPACE.match(pattern, position):
            items.append(Space())
        elif match := _ESCAPED.match(pattern, position):
            _add(items, match[1] or ("\n" if match[2] else "\t"))
        elif match := _PLAIN.match(pattern, position):
            _add(items, match[0])
        else:
            return None
        position = match.end()
    return items


def _add(items: list[Item], text: str) -> None:
    if items and isinstance(items[-1], str):
        items[-1] += text
    else:
        items.append(text)


NAME = "response_template"
_CALLS = "tool_calls"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class TemplateFormats:
    """Formats that a template describes."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


@lru_cache(maxsize=64)
def read_response_template(text: str) -> TemplateFormats | None:
    """Return the formats that a template, given as JSON, describes; None if they cannot express it."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any]).get("fields")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() - {"content", _CALLS, *_THOUGHTS}:
        return None
    if not all(isinstance(field, dict) for field in fields.values()):
        return None
    reasoning = next((_reasoning(fields[name]) for name in _THOUGHTS if name in fields), None)
    tools = _tools(fields[_CALLS]) if _CALLS in fields else None
    described = any(name in fields for name in _THOUGHTS), _CALLS in fields
    if described != (reasoning is not None, tools is not None):
        return None
    return TemplateFormats(tools, reasoning)


def _reasoning(field: Mapping[str, Any]) -> ReasoningFormat | None:
    opens, closes = _literals(field.get("open")), _literals(field.get("close"))
    if not opens or not closes or field.get("content", "text") != "text":
        return None
    return ReasoningFormat(NAME, opens, closes)


def _tools(field: Mapping[str, Any]) -> ToolFormat | None:
    begin = _anchor(field, "open")
    end = _anchor(field, "close")
    if not begin or not isinstance(begin[0], str):
        return None
    marker = begin[0]
    ends = tuple(item for item in end or () if isinstance(item, str))
    content = _content(field, ends, named=Group("name") in begin)
    head = _head(begin[1:], content)
    if content is None or head is None:
        return None
    closing = tuple(Literal(text, optional=True) for text in ends)
    return ToolFormat(NAME, calls={marker: (*head, content, *closing)})


def _head(items: list[Item], content: Step | None) -> list[Step] | None:
    """Return the steps between the marker and the content."""
    steps: list[Step] = []
    for place, item in enumerate(items):
        if isinstance(item, str):
            steps.append(Literal(item))
            continue
        following = next((each for each in items[place + 1 :] if isinstance(each, str)), None)
        until = (following,) if following is not None else _first_texts(content)
        if item != Group("name") or not until:
            return None
        steps.append(Word(WordKind.NAME, until))
    return steps


def _first_texts(content: Step | None) -> tuple[str, ...]:
    match content:
        case JsonArguments():
            return ("{",)
        case TaggedArguments():
            return (content.key_open, *content.ends)
    return ()


def _content(field: Mapping[str, Any], ends: tuple[str, ...], *, named: bool) -> Step | None:
    kind, options = field.get("content"), field.get("content_args") or {}
    function = _transformed(field.get("transform"))
    if kind == "python-call-list" and not named:
        return PythonCalls()
    if kind == "xml-inline" and named and isinstance(options, dict):
        return _tags(options.get("tag_pattern"), ends)
    if kind != "json" or options:
        return None
    if named:
        whole = isinstance(function, dict) and function.get("arguments") == "{content}"
        return JsonArguments() if whole else None
    if function == "{content}" or _picks_parts(function):
        return CallList() if field.get("transform_each") else CallObject()
    return None


def _transformed(transform: Any) -> Any:
    """Return the `function` in OpenAI's shape that a transform makes of a call."""
    return transform.get("function") if isinstance(transform, dict) else None


def _picks_parts(function: Any) -> bool:
    """Return whether the name and the arguments are parts of the content, under the known names."""
    if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
        return False
    arguments = [f"{{content.{key}}}" for key in ("arguments", "parameters")]
    return function["name"] == "{content.name}" and function["arguments"] in arguments


def _tags(pattern: Any, ends: tuple[str, ...]) -> TaggedArguments | None:
    """Read `OPEN(key)CLOSE OPEN(value)CLOSE`, where the value may have no opening tag."""
    items = read_pattern(pattern) if isinstance(pattern, str) else None
    if items is None:
        return None
    padded = Space() in items
    match [item for item in items if not isinstance(item, Space)]:
        case [str(key_open), Group("key"), str(between), Group("value"), str(value_close)]:
            # `</arg_key><arg_value>` is two tags, `>` is one.
            cut = between.find("><") + 1 or len(between)
            key_close, value_open = between[:cut], between[cut:]
        case [str(key_open), Group("key"), str(key_close), str(value_open), Group("value"), str(value_close)]:
            pass
        case _:
            return None
    return TaggedArguments(key_open, key_close, value_open, value_close, ends, padded and not value_open)


def _anchor(field: Mapping[str, Any], which: str) -> list[Item] | None:
    """Return an anchor's texts and groups, without white space."""
    if isinstance(literal := field.get(which), str):
        return [literal]
    pattern = field.get(f"{which}_pattern")
    items = read_pattern(pattern) if isinstance(pattern, str) else None
    return None if items is None else [item for item in items if not isinstance(item, Space)]


def _literals(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(values) if values and all(isinstance(each, str) and each for each in values) else ()
