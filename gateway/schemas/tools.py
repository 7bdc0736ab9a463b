"""Tools of a chat: the functions that a model may call, and the calls that a request asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core.core_schema import ValidationInfo

from gateway.errors import bad_request
from gateway.parsing.toolset import NAME
from gateway.schemas.base import (
    BOUNDED,
    DEPRECATED,
    FieldError,
    RequestLimits,
    RequestModel,
    limits_of,
    only_known,
    plain_object,
    within,
)

_FIELD = "tool_choice"
_CHOICES = ("none", "auto", "required")
NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME.pattern}$"}


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has these properties and no other."""
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
    """Calls that a request asks for.

    names: the functions that may be called; single: at most one call; named: the request named that one;
    legacy: it is reported under its older names."""

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
    """Read the name in `{"type": "function", "function": {"name": ...}}`, which is at `path`."""
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
"""Reader of a `tool_choice`, as annotations of a field."""


_FUNCTION_CHOICES = ("none", "auto")


class Function(RequestModel):
    """Name, description and parameters of a function that the model may call."""

    name: FunctionName = Field(description="1 to 64 letters, digits, underscores and dashes.")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of its arguments.")


def _read_call(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _FUNCTION_CHOICES:
            raise FieldError("Invalid '{param}': must be 'none', 'auto', or an object with a 'name'.")
        return ToolChoice(CallMode(value))
    if not isinstance(value, dict):
        raise FieldError("Invalid type for '{param}': expected a string or an object.", "invalid_type")
    name = plain_object(value).get("name")
    if not isinstance(name, str) or len(value) != 1:
        raise FieldError("Invalid '{param}': must be an object with a 'name'.")
    return ToolChoice(CallMode.REQUIRED, (name,), named=True)


FUNCTION_CALL = (
    PlainValidator(_read_call),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(_FUNCTION_CHOICES)},
                object_schema(name=NAME_SCHEMA),
                {"type": "null"},
            ]
        }
    ),
)
"""Reader of a `function_call`, as annotations of a field."""


def _only_functions(value: Any) -> Any:
    kind = plain_object(value).get("type")
    if isinstance(kind, str) and kind != "function":
        raise FieldError(
            "Invalid '{param}': only tools of type 'function' are supported by this server.",
            "unsupported_parameter",
            "type",
        )
    return value


class FunctionTool(Function):
    """Function of a tool: a function with `strict`."""

    strict: bool | None = Field(None, description="Arguments must obey the schema.")


class Tool(RequestModel):
    """A tool that a model may use."""

    type: Literal["function"]
    function: FunctionTool


class ToolListFields(RequestModel):
    """The tools, in every request that a chat template renders."""

    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(_only_functions)]] | None,
        FailFast(),
        BOUNDED,
        within("max_tools"),
    ] = Field(None, description="Functions that the model may call.")

    @property
    def offered(self) -> Sequence[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def tools_param(self) -> str:
        """Name of their field."""
        return "tools"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the parameters, by function."""
        return {function.name: function.parameters or {} for function in self.offered}

    @property
    def tools_json(self) -> str:
        """Tools as a chat template sees them; empty if there are none."""
        if not (offered := self.offered):
            return ""
        return msgspec.json.encode([_shown(function) for function in offered]).decode()

    def check_tools(self, limits: RequestLimits) -> None:
        """Check across these fields. Raises ApiError."""
        param = self.tools_param
        if len(self.schemas) != len(self.offered):
            raise bad_request(f"Invalid '{param}': two functions have the same name.", param)
        if len(self.tools_json.encode()) > limits.max_tools_bytes:
            raise bad_request(
                f"Invalid '{param}': they must have at most {limits.max_tools_bytes} bytes.", param
            )


class ToolFields(ToolListFields):
    """Choice among the tools."""

    tool_choice: Annotated[ToolChoice | None, *TOOL_CHOICE] = Field(
        None, description="none, auto, required, a function, or allowed_tools. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call. Default: true.")
    functions: Annotated[list[Function] | None, FailFast(), BOUNDED, within("max_tools")] = Field(
        None,
        description="The older name of tools, of which at most one is called.",
        json_schema_extra=DEPRECATED,
    )
    function_call: Annotated[ToolChoice | None, *FUNCTION_CALL] = Field(
        None,
        description="none, auto, or a function, with functions. Default: auto.",
        json_schema_extra=DEPRECATED,
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer.")

    @property
    def offered(self) -> Sequence[Function]:
        return self.functions or super().offered

    @property
    def tools_param(self) -> str:
        return "functions" if self.functions else "tools"

    @property
    def call_policy(self) -> CallPolicy:
        """Policy of the request for calls."""
        legacy = bool(self.functions)
        choice = (self.function_call if legacy else self.tool_choice) or ToolChoice(CallMode.AUTO)
        if not self.offered or choice.mode is CallMode.NONE:
            return NO_CALLS
        single = legacy or choice.named or self.parallel_tool_calls is False
        return CallPolicy(choice.mode, choice.names or tuple(self.schemas), single, choice.named, legacy)

    @property
    def tools_json(self) -> str:
        """Tools as the template sees them; none if the model is not to call any."""
        return "" if self.call_policy.mode is CallMode.NONE else super().tools_json

    def check_tools(self, limits: RequestLimits) -> None:
        super().check_tools(limits)
        if self.functions:
            if self.tools:
                raise bad_request("'functions' cannot be combined with 'tools'.", "functions")
            if self.parallel_tool_calls:
                raise bad_request(
                    "'parallel_tool_calls' is only allowed when 'tools' are given.", "parallel_tool_calls"
                )
        self._check_choice("tool_choice", self.tool_choice, "tools", self.tools)
        self._check_choice("function_call", self.function_call, "functions", self.functions)

    def _check_choice(
        self, param: str, given: ToolChoice | None, of: str, offered: Sequence[RequestModel] | None
    ) -> None:
        choice = given or ToolChoice(CallMode.AUTO if offered else CallMode.NONE)
        if choice.mode is CallMode.NONE:
            return
        if not offered and choice == ToolChoice(CallMode.AUTO):
            # Without tools it has no effect; clients that offer tools only at times always send it.
            return
        if not offered:
            raise bad_request(f"'{param}' is only allowed when '{of}' are given.", param)
        if not self.schemas.keys() >= set(choice.names or ()):
            raise bad_request(f"Invalid '{param}': '{of}' has no such function.", param)


def _shown(function: Function) -> dict[str, Any]:
    given = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: item for name, item in given.items() if item is not None}}
