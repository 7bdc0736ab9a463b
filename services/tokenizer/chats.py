"""Chats of the contract as the workers take them."""

from __future__ import annotations

from collections.abc import Iterator

from catenary.rpc import RpcError, refuse
from catenary.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.rendering import ChatOptions, ChatTurn, TurnCall

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_turn(index: int, message: tokenizer_pb2.ChatMessage) -> ChatTurn:
    """Message `index` of a chat. Raises RpcError."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise _invalid(f"A role must be one of: {', '.join(ROLES)}.", f"{where}.role")
    for position, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            raise _invalid("A content part must hold text.", f"{where}.content[{position}]")
    if message.role != "assistant":
        if message.tool_calls:
            raise _invalid("Only an assistant's message may have tool calls.", f"{where}.tool_calls")
        if message.HasField("reasoning"):
            raise _invalid("Only an assistant's message may have reasoning.", f"{where}.reasoning")
    if message.HasField("tool_call_id") and message.role != "tool":
        raise _invalid("Only a tool's message may answer a tool call.", f"{where}.tool_call_id")
    # Calls and thoughts may stand alone. Any other message without parts has an empty text.
    says = message.content or not (message.tool_calls or message.HasField("reasoning"))
    return ChatTurn(
        message.role,
        "".join(part.text for part in message.content) if says else None,
        message.name if message.HasField("name") else None,
        tuple(TurnCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id if message.HasField("tool_call_id") else None,
        message.reasoning if message.HasField("reasoning") else None,
    )


def texts_of(turn: ChatTurn) -> Iterator[str]:
    """All texts of a message."""
    yield from filter(None, (turn.content, turn.name, turn.tool_call_id, turn.reasoning))
    for call in turn.tool_calls:
        yield from (call.id, call.name, call.arguments)


def read_options(chat: tokenizer_pb2.ChatInput) -> ChatOptions:
    """What a chat asks for besides its messages. Raises RpcError."""
    goes_on = chat.continue_final_message
    generate = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not goes_on
    if generate and goes_on:
        raise _invalid(
            "The last message cannot be gone on with when a new one is begun (add_generation_prompt).",
            "continue_final_message",
        )
    return ChatOptions(
        add_generation_prompt=generate,
        continue_final_message=goes_on,
        add_special_tokens=chat.add_special_tokens,
        tools=chat.tools_json,
        documents=chat.documents_json,
        variables=chat.template_variables_json,
        chat_template=chat.chat_template if chat.HasField("chat_template") else None,
    )


def _invalid(message: str, param: str) -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
