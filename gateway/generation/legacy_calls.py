"""Calls of functions as chats had them before tools, as calls of tools."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.parsing.choice import id_style
from gateway.parsing.output import IdStyle
from gateway.schemas.messages import ChatMessage, ToolCall


def with_tools(messages: Sequence[ChatMessage], tool_parser: str) -> Sequence[ChatMessage]:
    """The messages with calls and results of tools in place of those of functions, which have no ids.

    A result is of the last call of its function, or of the last call if there is none of it. `tool_parser`:
    of the model, whose template may ask for a certain form of ids."""
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    style = id_style(tool_parser)
    used: dict[str, str] = {}
    made = []
    for message in messages:
        if message.function_call is not None:
            name = message.function_call.name
            call = ToolCall(id=_new_id(style, name, used), function=message.function_call)
            used[call.id] = name
            message = message.model_copy(update={"function_call": None, "tool_calls": [call]})
        elif message.role == "function":
            name = message.name or ""
            call_id = next((found for found in reversed(used) if used[found] == name), None)
            call_id = call_id or next(reversed(used), None) or _new_id(style, name, used)
            message = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        else:
            used |= {call.id: call.function.name for call in message.tool_calls or ()}
        made.append(message)
    return made


def _new_id(style: IdStyle, name: str, used: dict[str, str]) -> str:
    if style is IdStyle.OWN:
        return style.make(name, "", used)
    # Nine letters and digits, which suit every template; the same for the same chat, for the prefix cache.
    number = len(used)
    while (made := f"call{number:05d}") in used:
        number += 1
    return made
