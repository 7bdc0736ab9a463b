"""Requests of the contract to tasks for the workers, checked against the limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catenary.rpc import RpcError, refuse
from catenary.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import ChatTurn
from services.tokenizer.workers import ChatTask, CompletionTask, DetokenizeTask, Task, TokenizeTask

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class SizedTask:
    """A task, and the bytes that it holds while it waits."""

    task: Task
    size: int


class RequestReader:
    """Reads requests for the one model. Every method raises RpcError for what is wrong with one."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._model = config.model_name

    def check_model(self, name: str) -> None:
        """Empty means the only model."""
        if name not in ("", self._model):
            raise refuse(
                common_pb2.ERROR_CODE_MODEL_NOT_FOUND,
                "The model does not exist on this server.",
                param="model",
            )

    def render(self, request: tokenizer_pb2.RenderRequest) -> SizedTask:
        """A chat or completion."""
        self.check_model(request.model)
        limit = request.max_prompt_tokens if request.HasField("max_prompt_tokens") else None
        match request.WhichOneof("input"):
            case "chat":
                return self._chat(request.chat, limit)
            case "completion":
                return self._completion(request.completion, limit)
            case _:
                raise _invalid("A chat or a completion is required.", "input")

    def tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> SizedTask:
        """A plain text."""
        self.check_model(request.model)
        size = self._check_size([request.text], "text")
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return SizedTask(TokenizeTask(request.text, add_special), size)

    def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> SizedTask:
        """Token ids."""
        self.check_model(request.model)
        _check_count(len(request.token_ids), self._config.max_token_ids, "token ids", "tokens")
        task = DetokenizeTask(list(request.token_ids), request.skip_special_tokens)
        return SizedTask(task, 4 * len(task.token_ids))

    def _chat(self, chat: tokenizer_pb2.ChatInput, limit: int | None) -> SizedTask:
        if not chat.messages:
            raise _invalid("There must be at least one message.", "messages")
        _check_count(len(chat.messages), self._config.max_messages, "messages", "messages")
        parts = sum(len(message.content) for message in chat.messages)
        _check_count(parts, self._config.max_content_parts, "content parts", "messages")
        turns = [_turn(index, message) for index, message in enumerate(chat.messages)]
        size = self._check_size(
            (text for turn in turns for text in (turn.content, turn.name or "")), "messages"
        )
        prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return SizedTask(ChatTask(turns, prompt, limit), size)

    def _completion(self, completion: tokenizer_pb2.CompletionInput, limit: int | None) -> SizedTask:
        if not completion.prompts:
            raise _invalid("There must be at least one prompt.", "prompt")
        _check_count(len(completion.prompts), self._config.max_prompts, "prompts", "prompt")
        size = self._check_size(completion.prompts, "prompt")
        add_special = completion.add_special_tokens if completion.HasField("add_special_tokens") else True
        return SizedTask(CompletionTask(list(completion.prompts), add_special, limit), size)

    def _check_size(self, texts: Iterable[str], param: str) -> int:
        size = sum(len(text.encode()) for text in texts)
        if size > self._config.max_text_bytes:
            raise _invalid(
                f"The text has {size} bytes; at most {self._config.max_text_bytes} are allowed.", param
            )
        return size


def _turn(index: int, message: tokenizer_pb2.ChatMessage) -> ChatTurn:
    if message.role not in ROLES:
        raise _invalid(f"A role must be one of: {', '.join(ROLES)}.", f"messages[{index}].role")
    for position, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            raise _invalid("A content part must hold text.", f"messages[{index}].content[{position}]")
    text = "".join(part.text for part in message.content)
    return ChatTurn(message.role, text, message.name if message.HasField("name") else None)


def _check_count(count: int, limit: int, what: str, param: str) -> None:
    if count > limit:
        raise _invalid(f"There are {count} {what}; at most {limit} are allowed.", param)


def _invalid(message: str, param: str) -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
