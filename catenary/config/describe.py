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
    ServiceConfig,
    env_name,
    flag_name,
    is_boolean,
    is_list,
    is_secret,
)


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


def options_markdown(classes: Mapping[str, type[ServiceConfig]]) -> str:
    """One table per class for docs/configuration.md; keys are the headings. Each ends with a line break."""
    return "\n".join(_section(title, cls) for title, cls in classes.items())


def _section(title: str, cls: type[ServiceConfig]) -> str:
    rows = [
        f"| `{flag_name(name)}` | `{env_name(cls, name)}` | {_cell(_type_text(field))} "
        f"| {_cell(default_text(name, field))} | {_cell(field.description or '', code=False)} |"
        for name, field in cls.model_fields.items()
    ]
    head = "| flag | environment | value | default | meaning |\n| --- | --- | --- | --- | --- |"
    return f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n"


def _type_text(field: FieldInfo) -> str:
    return "true|false" if is_boolean(field) else placeholder(field)


def _cell(text: str, *, code: bool = True) -> str:
    safe = text.replace("|", "\\|").replace("\n", " ")
    return f"`{safe}`" if code else safe
