"""What a template is given: messages, tools, documents and variables as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.tokenizer.rendering.turns import ChatOptions, ChatTurn
from services.tokenizer.rendering.values import (
    JsonLimits,
    map_strings,
    read_object,
    read_objects,
    strings,
)


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """How a template wants to be told of a message.

    `parts`: content as a list of parts. `needs_content`: a message without content has an empty one.
    `text_arguments`: arguments of a call as JSON text, where most templates want an object.
    """

    parts: bool = False
    needs_content: bool = False
    text_arguments: bool = False


@dataclass(frozen=True, slots=True)
class ChatInputs:
    """None: the caller gave no tools, or no documents."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]

    def strings(self) -> Iterator[str]:
        """Every text that a caller wrote, and some of ours."""
        for part in (self.messages, self.tools, self.documents, self.variables):
            yield from strings(part)

    def map(self, change: Callable[[str], str]) -> ChatInputs:
        """The same with every text changed, but for the names of variables."""
        return ChatInputs(
            map_strings(self.messages, change),
            map_strings(self.tools, change),
            map_strings(self.documents, change),
            {name: map_strings(value, change) for name, value in self.variables.items()},
        )

    def with_messages(self, messages: list[dict[str, Any]]) -> ChatInputs:
        """The same with other messages."""
        return replace(self, messages=messages)


def read_inputs(
    turns: Sequence[ChatTurn], options: ChatOptions, style: MessageStyle, limits: JsonLimits
) -> ChatInputs:
    """A request's parts as plain data. Raises RenderRefused for JSON that is none or has another form."""
    tools, documents, variables = options.tools, options.documents, options.variables
    return ChatInputs(
        [message_of(turn, style, limits, index) for index, turn in enumerate(turns)],
        read_objects(tools, param="tools", limits=limits) if tools else None,
        read_objects(documents, param="documents", limits=limits) if documents else None,
        read_object(variables, param="chat_template_kwargs", limits=limits) if variables else {},
    )


def message_of(turn: ChatTurn, style: MessageStyle, limits: JsonLimits, index: int = 0) -> dict[str, Any]:
    """One message. Raises RenderRefused for arguments that are no JSON object."""
    message: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    content = "" if turn.content is None and style.needs_content else turn.content
    if content is not None:
        message["content"] = [{"type": "text", "text": content}] if style.parts else content
    if turn.name is not None:
        message["name"] = turn.name
    if turn.reasoning is not None:
        # gpt-oss reads it as `thinking`; transformers gives both names too.
        message["reasoning_content"] = message["thinking"] = turn.reasoning
    if turn.tool_calls:
        calls = []
        for position, call in enumerate(turn.tool_calls):
            param = f"messages.{index}.tool_calls.{position}.function.arguments"
            arguments = read_object(call.arguments or "{}", param=param, limits=limits)
            shown = (call.arguments or "{}") if style.text_arguments else arguments
            function = {"name": call.name, "arguments": shown}
            calls.append({"id": call.id, "type": "function", "function": function})
        message["tool_calls"] = calls
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message
