"""From a response's request to that of a chat, and an error of the chat back to the field it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from gateway.ignored import current_ignored
from gateway.responses import items
from gateway.responses.turns import Origin, chat_messages
from gateway.schemas.responses import BY_CHAT_NAME, OTHER_TOOLS, ResponsesRequest, ResponseTool

PREVIOUS = "previous_response_id"
INSTRUCTIONS = "instructions"
_INPUT = "input."
# Taken over as they are.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
)


@dataclass(frozen=True, slots=True)
class Origins:
    """Where in a response's request its chat came from: each message, and each tool by its place."""

    messages: Sequence[Origin]
    tools: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The body of a chat, and where it came from."""

    body: dict[str, Any]
    origins: Origins


def chat_body(
    request: ResponsesRequest,
    history: Sequence[items.Item],
    given: Sequence[items.Item],
    extensions: dict[str, Any],
) -> ChatBody:
    """The chat that answers a request.

    Args:
        request: the request.
        history: the items of the responses before it.
        given: its own input as items.
        extensions: parameters of chats that the request has beside its own.
    """
    messages: list[dict[str, Any]] = []
    origins: list[Origin] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        origins.append(Origin(INSTRUCTIONS))
    sources = [PREVIOUS] * len(history) + [f"{_INPUT}{index}" for index in range(len(given))]
    for message, origin in chat_messages(zip([*history, *given], sources, strict=True)):
        messages.append(message)
        origins.append(origin)
    values = {name: getattr(request, name) for name in _SAME} | {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [chat_tool(tool) for tool in request.functions.values()] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "response_format": _response_format(request),
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "logprobs": True if request.wants_logprobs else None,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
    }
    if request.truncation == "auto":
        values["truncation"] = request.truncation
    body = extensions | {name: value for name, value in values.items() if value is not None}
    return ChatBody(body, Origins(origins, list(request.functions)))


def chat_tool(tool: ResponseTool) -> dict[str, Any]:
    """A tool as chats have it: the function in an object of its own."""
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": kind, "function": {name: value for name, value in choice.items() if name != "type"}}
    if kind == "allowed_tools":
        inner = {name: value for name, value in choice.items() if name != "type"}
        if isinstance(inner.get("tools"), list):
            inner["tools"] = [
                _tool_choice(tool) for place, tool in enumerate(inner["tools"]) if _offered(tool, place)
            ]
        return {"type": kind, "allowed_tools": inner}
    return choice


def _offered(tool: Any, place: int) -> bool:
    """Whether an allowed tool is a function, or anything else that the chat is to judge."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind not in OTHER_TOOLS:
        return True
    current_ignored().note("tool_choice", "tools", place)
    return False


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    chosen = request.text.format if request.text is not None else None
    if chosen is None or chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return {"type": chosen.type}
    schema = chosen.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": chosen.type, "json_schema": schema}


def of_response(error: ApiError, origins: Origins) -> ApiError:
    """An error of the chat as one of the response: its fields under the names that the client used."""
    if error.param is None:
        return error
    param = _origin(error.param, origins)
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return ApiError(
        error.status,
        message,
        kind=error.kind,
        code=error.code,
        param=param,
        retry_after_ms=error.retry_after_ms,
        headers=error.extra_headers,
    )


def _origin(param: str, origins: Origins) -> str:
    parts = param.split(".")
    place = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else -1
    if parts[0] == "messages" and 0 <= place < len(origins.messages):
        return _item(origins.messages[place], parts[2:])
    if parts[0] == "tools" and 0 <= place < len(origins.tools):
        parts[1] = str(origins.tools[place])
    if parts[0] in ("tools", "tool_choice"):
        return ".".join(part for part in parts if part not in ("function", "allowed_tools"))
    for count in (2, 1):
        if (name := BY_CHAT_NAME.get(".".join(parts[:count]))) is not None:
            return ".".join([name, *parts[count:]])
    return param


def _item(origin: Origin, field: Sequence[str]) -> str:
    """The item that a field of a message came from; of a call its own, with the field of the function."""
    match field:
        case ("tool_calls", index, *rest) if index.isdecimal() and int(index) < len(origin.calls):
            item = origin.calls[int(index)]
            # Which items a stored response has, its client need not know.
            names = [name for name in rest if name != "function"] if item.startswith(_INPUT) else []
            return ".".join([item, *names])
    return origin.item
