"""Options as text: placeholders and defaults for --help, tables for the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from catenary.config.settings import (
    Expert,
    ServiceConfig,
    env_name,
    flag_name,
    is_boolean,
    is_list,
    is_secret,
)

# The group of options that no heading covers.
_NO_HEADING = "Options"


def _kinds(annotation: Any) -> list[Any]:
    """The scalar types in an annotation: unions and containers taken apart."""
    if get_origin(annotation) is Literal:
        return [annotation]
    inner = [arg for arg in get_args(annotation) if arg is not Ellipsis]
    if not inner:
        return [] if annotation is type(None) else [annotation]
    return [kind for arg in inner for kind in _kinds(arg)]


def placeholder(field: FieldInfo) -> str:
    """What stands for the value in --help: INT, FILE, a|b."""
    kind = next(iter(_kinds(field.annotation)), str)
    if get_origin(kind) is Literal:
        text = "|".join(str(value) for value in get_args(kind))
    elif inspect.isclass(kind) and issubclass(kind, Enum):
        text = "|".join(str(member.value) for member in kind)
    elif kind is Path:
        text = "PATH"
    else:
        text = {int: "INT", float: "NUMBER", bool: "BOOL"}.get(kind, "TEXT")
    return f"{text}[,...]" if is_list(field) else text


def default_text(name: str, field: FieldInfo) -> str:
    """The default as one would write it on the command line."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), [], "", frozenset()):
        return "none"
    if is_secret(name, field):
        return "set"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(str(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


def option_groups(cls: type[ServiceConfig]) -> dict[str, list[str]]:
    """Return the fields by heading, first those of the most derived class that declares any.

    A group ends at the next heading, or with the class that declares its first field. One that the class
    itself begins goes on over fields of its bases.
    """
    headings = {name: text for base in cls.__mro__ for name, text in getattr(base, "headings", {}).items()}
    declared = {name: base for base in cls.__mro__ for name in inspect.get_annotations(base)}
    groups: dict[str, list[str]] = {}
    heading, first = _NO_HEADING, None
    for name in cls.model_fields:
        if name in headings:
            heading, first = headings[name], declared[name]
        elif declared[name] is not first and first is not cls:
            heading, first = _NO_HEADING, declared[name]
        groups.setdefault(heading, []).append(name)
    own = next(names for base in cls.__mro__ if (names := inspect.get_annotations(base)))
    return dict(sorted(groups.items(), key=lambda item: item[1][0] not in own))


def options_markdown(classes: Mapping[str, type[ServiceConfig]]) -> str:
    """Return a section for each class, keys being the titles, with a table for each group of options.

    Groups with an `Expert` heading come last. The text ends with a line break.
    """
    return "\n".join(_section(title, cls) for title, cls in classes.items())


def _section(title: str, cls: type[ServiceConfig]) -> str:
    groups = option_groups(cls)
    usual = {heading: names for heading, names in groups.items() if not isinstance(heading, Expert)}
    expert = {heading: names for heading, names in groups.items() if isinstance(heading, Expert)}
    text = f"## {title}\n" + "".join(_table(cls, f"### {heading}", names) for heading, names in usual.items())
    if expert:
        text += "\n### Expert options\n\nThe defaults serve nearly all deployments.\n"
        text += "".join(_table(cls, f"#### {heading}", names) for heading, names in expert.items())
    return text


def _table(cls: type[ServiceConfig], heading: str, names: list[str]) -> str:
    rows = [
        f"| `{flag_name(name)}` | `{env_name(cls, name)}` | {_cell(_type_text(field))} "
        f"| {_cell(default_text(name, field))} | {_cell(field.description or '', code=False)} |"
        for name, field in cls.model_fields.items()
        if name in names
    ]
    head = "| flag | variable | value | default | meaning |\n| --- | --- | --- | --- | --- |"
    return f"\n{heading}\n\n{head}\n" + "\n".join(rows) + "\n"


def _type_text(field: FieldInfo) -> str:
    return "true|false" if is_boolean(field) else placeholder(field)


def _cell(text: str, *, code: bool = True) -> str:
    safe = text.replace("|", "\\|").replace("\n", " ")
    return f"`{safe}`" if code else safe
