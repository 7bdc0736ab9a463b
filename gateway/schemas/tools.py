"""Tools of a chat: the functions that a model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, FailFast, Field

from gateway.errors import bad_request
from gateway.schemas.base import DEPRECATED, FieldError, RequestModel, plain_object, within
from gateway.schemas.calls import NO_CALLS, TOOL_CHOICE, CallMode, CallPolicy, ToolChoice
from gateway.schemas.data import BOUNDED
from gateway.schemas.functions import FUNCTION_CALL, Function
from gateway.schemas.limits import RequestLimits


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
    """A function."""

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
        """The functions."""
        return [tool.function for tool in self.tools or ()]

    @property
    def tools_param(self) -> str:
        """The field that they came in."""
        return "tools"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters' schemas, by function."""
        return {function.name: function.parameters or {} for function in self.offered}

    @property
    def tools_json(self) -> str:
        """The tools as a chat template sees them; empty if there are none."""
        if not (offered := self.offered):
            return ""
        return msgspec.json.encode([_shown(function) for function in offered]).decode()

    def check_tools(self, limits: RequestLimits) -> None:
        """Checks across these fields. Raises ApiError."""
        param = self.tools_param
        if len(self.schemas) != len(self.offered):
            raise bad_request(f"Invalid '{param}': two functions have the same name.", param)
        if len(self.tools_json.encode()) > limits.max_tools_bytes:
            raise bad_request(
                f"Invalid '{param}': they must have at most {limits.max_tools_bytes} bytes.", param
            )


class ToolFields(ToolListFields):
    """What is wanted of the tools."""

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
        """What is wanted of calls."""
        legacy = bool(self.functions)
        choice = (self.function_call if legacy else self.tool_choice) or ToolChoice(CallMode.AUTO)
        if not self.offered or choice.mode is CallMode.NONE:
            return NO_CALLS
        single = legacy or choice.named or self.parallel_tool_calls is False
        return CallPolicy(choice.mode, choice.names or tuple(self.schemas), single, choice.named, legacy)

    @property
    def tools_json(self) -> str:
        """As above; a model that is not to call any sees none."""
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
            # Without tools that is what happens anyway, and clients that offer tools at times send it always.
            return
        if not offered:
            raise bad_request(f"'{param}' is only allowed when '{of}' are given.", param)
        if not self.schemas.keys() >= set(choice.names or ()):
            raise bad_request(f"Invalid '{param}': '{of}' has no such function.", param)


def _shown(function: Function) -> dict[str, Any]:
    given = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: item for name, item in given.items() if item is not None}}
