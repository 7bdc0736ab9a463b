"""Chats as the tokenizer service takes them."""

from __future__ import annotations

import msgspec

from catenary.text import TokenizerTraits
from catenary.v1 import tokenizer_pb2
from gateway.generation.legacy_calls import with_tools
from gateway.schemas.chat_input import ChatInputFields
from gateway.schemas.messages import ChatMessage


def to_chat_input(fields: ChatInputFields, traits: TokenizerTraits) -> tokenizer_pb2.ChatInput:
    """The part of a request that its template sees. Raises ApiError for variables that it does not read."""
    variables = fields.template_variables(traits.template_variables)
    return tokenizer_pb2.ChatInput(
        messages=[_message(message) for message in with_tools(fields.messages, traits.tool_parser)],
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        add_special_tokens=fields.add_special_tokens,
        tools_json=fields.tools_json,
        documents_json=msgspec.json.encode(fields.documents).decode() if fields.documents else "",
        template_variables_json=msgspec.json.encode(variables).decode() if variables else "",
        chat_template=fields.chat_template,
    )


def _message(message: ChatMessage) -> tokenizer_pb2.ChatMessage:
    calls = [
        tokenizer_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    ]
    return tokenizer_pb2.ChatMessage(
        role=message.role,
        content=[tokenizer_pb2.ContentPart(text=text) for text in message.texts],
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.thoughts,
    )
