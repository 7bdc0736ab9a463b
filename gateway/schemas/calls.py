"""The calls that a request asks for: whether there are any, of which functions, how many."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.parsing.toolset import NAME
from gateway.schemas.base import FieldError, limits_of, only_known, plain_object

_FIELD = "tool_choice"
_CHOICES = ("none", "auto", "required")
NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME.pattern}$"}


def object_schema(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object that has these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NAMED_SCHEMA = object_schema(type={"const": "function"}, function=object_schema(name=NAME_SCHEMA))
_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "enum": list(_CHOICES)},
            _NAMED_SCHEMA,
            object_schema(
                type={"const": "allowed_tools"},
                allowed_tools=object_schema(
                    mode={"enum": ["auto", "required"]},
                    tools={"type": "array", "minItems": 1, "items": _NAMED_SCHEMA},
                ),
            ),
            {"type": "null"},
        ]
    }
)


def _name(value: Any) -> Any:
    if isinstance(value, str) and NAME.fullmatch(value) is None:
        raise FieldError("Invalid '{param}': must be 1 to 64 letters, digits, underscores and dashes.")
    return value


FunctionName = Annotated[str, BeforeValidator(_name), WithJsonSchema(NAME_SCHEMA)]


class CallMode(Enum):
    """Whether a model calls: NONE never, AUTO as it likes, REQUIRED at least once."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The value of `tool_choice`.

    names: the functions that may be called; None: all; named: the request named that one."""

    mode: CallMode
    names: tuple[str, ...] | None = None
    named: bool = False


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """The calls that a request asks for.

    names: the functions that may be called; single: at most one call; named: the request named that one;
    legacy: it is told under its older names."""

    mode: CallMode
    names: tuple[str, ...] = ()
    single: bool = False
    named: bool = False
    legacy: bool = False


NO_CALLS = CallPolicy(CallMode.NONE)


def _read_choice(value: Any, info: ValidationInfo) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _CHOICES:
            words = ", ".join(f"'{choice}'" for choice in _CHOICES)
            raise FieldError(f"Invalid '{{param}}': must be one of {words}, or an object.")
        return ToolChoice(CallMode(value))
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected a string or an object.", "invalid_type")
    kind = plain_object(value).get("type")
    if kind == "function":
        return ToolChoice(CallMode.REQUIRED, (_named(value, ()),), named=True)
    if kind != "allowed_tools":
        raise FieldError("Invalid '{param}': must be 'function' or 'allowed_tools'.", at="type")
    return _read_allowed(value, limits_of(info).max_tools)


def _read_allowed(value: dict[str, Any], most: int) -> ToolChoice:
    allowed = value.get("allowed_tools")
    if not isinstance(allowed, dict) or not only_known(value, {"type", "allowed_tools"}, _FIELD):
        raise FieldError("Invalid '{param}': must be an object with 'mode' and 'tools'.", at="allowed_tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    known = only_known(allowed, {"mode", "tools"}, _FIELD, "allowed_tools")
    if mode not in ("auto", "required") or not known:
        raise FieldError("Invalid '{param}': must be 'auto' or 'required'.", at="allowed_tools.mode")
    if not isinstance(tools, list) or not 0 < len(tools) <= most:
        raise FieldError(f"Invalid '{{param}}': must be 1 to {most} tools.", at="allowed_tools.tools")
    names = (_named(tool, ("allowed_tools", "tools", place)) for place, tool in enumerate(tools))
    return ToolChoice(CallMode(mode), tuple(dict.fromkeys(names)))


def _named(tool: Any, path: tuple[int | str, ...]) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, which is at `path`."""
    here = "".join(f"{part}." for part in path)
    whole = isinstance(tool, dict) and only_known(tool, {"type", "function"}, _FIELD, *path)
    if not whole or tool.get("type") != "function":
        raise FieldError("Invalid '{param}': must be 'function'.", at=f"{here}type")
    function = tool.get("function")
    whole = isinstance(function, dict) and only_known(function, {"name"}, _FIELD, *path, "function")
    name = function.get("name") if whole else None
    if not isinstance(name, str):
        raise FieldError("Invalid '{param}': must be an object with a 'name'.", at=f"{here}function")
    return name


TOOL_CHOICE = (PlainValidator(_read_choice), _SCHEMA)
"""What reads a `tool_choice`, as annotations of a field."""
