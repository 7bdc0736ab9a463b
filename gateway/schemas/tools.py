"""Tools of a chat: the functions that a model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.parsing import NAME
from gateway.schemas.base import FieldError, RequestModel, limits_of, plain_object, within
from gateway.schemas.data import BOUNDED
from gateway.schemas.limits import RequestLimits

_CHOICES = ("none", "auto", "required")
_NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME.pattern}$"}


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NAMED_SCHEMA = _object_schema(type={"const": "function"}, function=_object_schema(name=_NAME_SCHEMA))
_CHOICE_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "enum": list(_CHOICES)},
            _NAMED_SCHEMA,
            _object_schema(
                type={"const": "allowed_tools"},
                allowed_tools=_object_schema(
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


FunctionName = Annotated[str, BeforeValidator(_name), WithJsonSchema(_NAME_SCHEMA)]


def _only_functions(value: Any) -> Any:
    kind = plain_object(value).get("type")
    if isinstance(kind, str) and kind != "function":
        raise FieldError(
            "Invalid '{param}': only tools of type 'function' are supported by this server.",
            "unsupported_parameter",
            "type",
        )
    return value


class FunctionTool(RequestModel):
    """A function."""

    name: FunctionName = Field(description="1 to 64 letters, digits, underscores and dashes.")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of its arguments.")
    strict: bool | None = Field(None, description="Arguments must obey the schema.")


class Tool(RequestModel):
    """A tool that a model may use."""

    type: Literal["function"]
    function: FunctionTool


class CallMode(Enum):
    """Whether a model calls: NONE never, AUTO as it likes, REQUIRED at least once."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What `tool_choice` says.

    names: the functions that may be called; None: all; named: the request named that one."""

    mode: CallMode
    names: tuple[str, ...] | None = None
    named: bool = False


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What a request wants of calls.

    names: the functions that may be called; single: at most one call; named: the request named that one."""

    mode: CallMode
    names: tuple[str, ...] = ()
    single: bool = False
    named: bool = False


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
        return ToolChoice(CallMode.REQUIRED, (_named(value, ""),), named=True)
    if kind != "allowed_tools":
        raise FieldError("Invalid '{param}': must be 'function' or 'allowed_tools'.", at="type")
    return _read_allowed(value, limits_of(info).max_tools)


def _read_allowed(value: dict[str, Any], most: int) -> ToolChoice:
    allowed = value.get("allowed_tools")
    if value.keys() - {"type", "allowed_tools"} or not isinstance(allowed, dict):
        raise FieldError("Invalid '{param}': must be an object with 'mode' and 'tools'.", at="allowed_tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or allowed.keys() - {"mode", "tools"}:
        raise FieldError("Invalid '{param}': must be 'auto' or 'required'.", at="allowed_tools.mode")
    if not isinstance(tools, list) or not 0 < len(tools) <= most:
        raise FieldError(f"Invalid '{{param}}': must be 1 to {most} tools.", at="allowed_tools.tools")
    names = (_named(tool, f"allowed_tools.tools.{place}.") for place, tool in enumerate(tools))
    return ToolChoice(CallMode(mode), tuple(dict.fromkeys(names)))


def _named(tool: Any, at: str) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or tool.keys() - {"type", "function"}:
        raise FieldError("Invalid '{param}': must be 'function'.", at=f"{at}type")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) and len(function) == 1 else None
    if not isinstance(name, str):
        raise FieldError("Invalid '{param}': must be an object with a 'name'.", at=f"{at}function")
    return name


class ToolListFields(RequestModel):
    """The tools, in every request that a chat template renders."""

    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(_only_functions)]] | None,
        FailFast(),
        BOUNDED,
        within("max_tools"),
    ] = Field(None, description="Functions that the model may call.")

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters' schemas, by function."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools or ()}

    @property
    def tools_json(self) -> str:
        """The tools as a chat template sees them; empty if there are none."""
        if not self.tools:
            return ""
        return msgspec.json.encode([_shown(tool.function) for tool in self.tools]).decode()

    def check_tools(self, limits: RequestLimits) -> None:
        """Checks across these fields. Raises ApiError."""
        if len(self.schemas) != len(self.tools or ()):
            raise bad_request("Invalid 'tools': two functions have the same name.", "tools")
        if len(self.tools_json.encode()) > limits.max_tools_bytes:
            raise bad_request(
                f"Invalid 'tools': they must have at most {limits.max_tools_bytes} bytes.", "tools"
            )


class ToolFields(ToolListFields):
    """What is wanted of the tools."""

    tool_choice: Annotated[ToolChoice | None, PlainValidator(_read_choice), _CHOICE_SCHEMA] = Field(
        None, description="none, auto, required, a function, or allowed_tools. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default: true.")
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer.")

    @property
    def call_policy(self) -> CallPolicy:
        """What is wanted of calls."""
        choice = self.tool_choice or ToolChoice(CallMode.AUTO)
        if not self.tools or choice.mode is CallMode.NONE:
            return NO_CALLS
        single = choice.named or self.parallel_tool_calls is False
        return CallPolicy(choice.mode, choice.names or tuple(self.schemas), single, choice.named)

    @property
    def tools_json(self) -> str:
        """As above; a model that is not to call any sees none."""
        return "" if self.call_policy.mode is CallMode.NONE else super().tools_json

    def check_tools(self, limits: RequestLimits) -> None:
        super().check_tools(limits)
        choice = self.tool_choice or ToolChoice(CallMode.AUTO if self.tools else CallMode.NONE)
        if choice.mode is CallMode.NONE:
            return
        if self.tools is None or (not self.tools and choice != ToolChoice(CallMode.AUTO)):
            raise bad_request("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
        if not self.schemas.keys() >= set(choice.names or ()):
            raise bad_request("Invalid 'tool_choice': 'tools' has no such function.", "tool_choice")


def _shown(function: FunctionTool) -> dict[str, Any]:
    given = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: item for name, item in given.items() if item is not None}}
