"""The text side of a client: prompts to ids, ids to text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from catenary.client.connection import Connection
from catenary.rpc import RpcError
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import tokenizer_pb2

MAX_TOKENIZER_BYTES = 256 << 20


class TextSide:
    """Calls of the tokenizer service, and the vocabularies of the models that were asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._vocabularies: dict[str, Vocabulary] = {}

    async def render(self, request: tokenizer_pb2.RenderRequest) -> tuple[int, ...]:
        """Return the token ids of the one prompt in the request."""
        connection = self._connection
        response = await connection.ask_tokenizer(
            lambda: connection.tokenizer.Render(request, timeout=connection.timeout_s)
        )
        return tuple(response.prompts[0].token_ids)

    async def tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> tuple[int, ...]:
        """Return the token ids of a text."""
        connection = self._connection
        response = await connection.ask_tokenizer(
            lambda: connection.tokenizer.Tokenize(request, timeout=connection.timeout_s)
        )
        return tuple(response.token_ids)

    async def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> str:
        """Return the text of ids."""
        connection = self._connection
        response = await connection.ask_tokenizer(
            lambda: connection.tokenizer.Detokenize(request, timeout=connection.timeout_s)
        )
        return response.text

    async def tokenizer_file(self, model: str) -> tuple[bytes, tokenizer_pb2.TokenizerDigest]:
        """Return a model's tokenizer.json and its digest. Raises RpcError, or ValueError if they do not
        match."""
        data = bytearray()
        digest: tokenizer_pb2.TokenizerDigest | None = None
        request = tokenizer_pb2.GetTokenizerRequest(model=model)
        call = self._connection.tokenizer.GetTokenizer(request, timeout=self._connection.timeout_s)
        try:
            async for part in call:
                data += part.chunk
                if len(data) > MAX_TOKENIZER_BYTES:
                    raise ValueError(f"the tokenizer file is larger than {MAX_TOKENIZER_BYTES} bytes")
                if part.HasField("digest"):
                    digest = part.digest
        except grpc.aio.AioRpcError as error:
            raise RpcError(self._connection.tokenizer_error(error)) from None
        finally:
            call.cancel()
        if digest is None or digest.sha256 != hashlib.sha256(data).hexdigest():
            raise ValueError("the tokenizer file does not match its checksum")
        return bytes(data), digest

    async def vocabulary(self, model: str) -> Vocabulary:
        """Return the vocabulary that decodes the model's tokens; fetched once."""
        if model not in self._vocabularies:
            data, digest = await self.tokenizer_file(model)
            self._vocabularies[model] = Vocabulary(
                data,
                sha256=digest.sha256,
                special_ids=digest.special_token_ids,
                traits=TokenizerTraits.of(digest),
            )
        return self._vocabularies[model]


Messages = str | Sequence[Mapping[str, Any]]
"""A chat in OpenAI's form whose contents are text, or what a user says."""


def chat_input(
    messages: Messages,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    template_variables: Mapping[str, Any] | None = None,
) -> tokenizer_pb2.ChatInput:
    """Return a chat on the wire. Raises ValueError for messages of another form."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        raise ValueError("messages must be a list of objects with role and content, or one text")
    return tokenizer_pb2.ChatInput(
        messages=[_message(message, f"messages[{place}]") for place, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools_json=json.dumps(list(tools)) if tools else "",
        template_variables_json=json.dumps(dict(template_variables)) if template_variables else "",
    )


def _message(message: Any, name: str) -> tokenizer_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must be an object with a role and a content")
    try:
        calls = [
            tokenizer_pb2.ToolCall(
                id=call.get("id", ""), name=call["function"]["name"], arguments=call["function"]["arguments"]
            )
            for call in message.get("tool_calls") or ()
        ]
    except (KeyError, TypeError, AttributeError):
        reason = "must be objects with a function that has a name and arguments"
        raise ValueError(f"{name}.tool_calls {reason}") from None
    return tokenizer_pb2.ChatMessage(
        role=message["role"],
        content=[tokenizer_pb2.ContentPart(text=text) for text in _texts(message.get("content"), name)],
        name=message.get("name"),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id"),
        reasoning=message.get("reasoning_content"),
    )


def _texts(content: Any, name: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    parts = list(content) if isinstance(content, Sequence) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}.content must be a text, or a list of parts of type text")
    return [str(text) for text in texts]
