"""Read requests of the contract as tasks for the workers, checked against the limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from catenary.rpc import RpcError, refuse
from catenary.sequence_limits import MAX_TENANT
from catenary.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import ChatOptions, ChatTurn, PromptLimits, TextPair, TurnCall
from services.tokenizer.workers import ChatTask, CompletionTask, DetokenizeTask, PairTask, Task, TokenizeTask

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_turn(index: int, message: tokenizer_pb2.ChatMessage) -> ChatTurn:
    """Return message `index` of a chat. Raises RpcError."""
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
    """Yield all texts of a message."""
    yield from filter(None, (turn.content, turn.name, turn.tool_call_id, turn.reasoning))
    for call in turn.tool_calls:
        yield from (call.id, call.name, call.arguments)


def read_options(chat: tokenizer_pb2.ChatInput) -> ChatOptions:
    """Return the options of a chat. Raises RpcError."""
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


@dataclass(frozen=True, slots=True)
class SizedTask:
    """A task, the bytes of its texts, whose it is, and the seconds that it may take; None: the usual.

    `param`: the field that holds the texts.
    """

    task: Task
    size: int
    tenant: str = ""
    timeout_s: float | None = None
    param: str = "prompt"


class RequestReader:
    """Reads requests for the one model. Every method raises RpcError for what is wrong with one."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._model = config.model_name

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served. Empty means the only one."""
        if name not in ("", self._model):
            raise refuse(
                common_pb2.ERROR_CODE_MODEL_NOT_FOUND,
                "The model does not exist on this server.",
                param="model",
            )

    def render(self, request: tokenizer_pb2.RenderRequest) -> SizedTask:
        """Read a request to render a chat, a completion or pairs."""
        self.check_model(request.model)
        limits = _prompt_limits(request)
        match request.WhichOneof("input"):
            case "chat":
                return self._chat(request.chat, limits, _tenant(request))
            case "completion":
                return self._completion(request.completion, limits, _tenant(request))
            case "pairs":
                return self._pairs(request.pairs, limits, _tenant(request))
            case _:
                raise _invalid("A chat, a completion or pairs are required.", "input")

    def tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> SizedTask:
        """Read a request to tokenize a plain text."""
        self.check_model(request.model)
        size = self._check_size([request.text], "text")
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return SizedTask(TokenizeTask(request.text, add_special), size, _tenant(request), param="text")

    def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> SizedTask:
        """Read a request to detokenize ids."""
        self.check_model(request.model)
        _check_count(len(request.token_ids), self._config.max_token_ids, "token ids", "tokens")
        task = DetokenizeTask(list(request.token_ids), request.skip_special_tokens)
        return SizedTask(task, 4 * len(task.token_ids), _tenant(request), param="tokens")

    def _chat(self, chat: tokenizer_pb2.ChatInput, limits: PromptLimits, tenant: str) -> SizedTask:
        config = self._config
        if not chat.messages:
            raise _invalid("There must be at least one message.", "messages")
        _check_count(len(chat.messages), config.max_messages, "messages", "messages")
        parts = sum(len(message.content) for message in chat.messages)
        _check_count(parts, config.max_content_parts, "content parts", "messages")
        calls = sum(len(message.tool_calls) for message in chat.messages)
        _check_count(calls, config.max_tool_calls, "tool calls", "messages")
        turns = [read_turn(index, message) for index, message in enumerate(chat.messages)]
        size = self._check_size((text for turn in turns for text in texts_of(turn)), "messages")
        for text, param in (
            (chat.tools_json, "tools"),
            (chat.documents_json, "documents"),
            (chat.template_variables_json, "chat_template_kwargs"),
            (chat.chat_template, "chat_template"),
        ):
            size += self._check_size([text], param, given=size)
        return SizedTask(ChatTask(turns, read_options(chat), limits), size, tenant, param="messages")

    def _completion(
        self, completion: tokenizer_pb2.CompletionInput, limits: PromptLimits, tenant: str
    ) -> SizedTask:
        if not completion.prompts:
            raise _invalid("There must be at least one prompt.", "prompt")
        _check_count(len(completion.prompts), self._config.max_prompts, "prompts", "prompt")
        size = self._check_size(completion.prompts, "prompt")
        add_special = completion.add_special_tokens if completion.HasField("add_special_tokens") else True
        return SizedTask(CompletionTask(list(completion.prompts), add_special, limits), size, tenant)

    def _pairs(self, given: tokenizer_pb2.PairInput, limits: PromptLimits, tenant: str) -> SizedTask:
        if not given.pairs:
            raise _invalid("There must be at least one pair.", "pairs")
        _check_count(len(given.pairs), self._config.max_prompts, "pairs", "pairs")
        size = self._check_size((text for pair in given.pairs for text in (pair.first, pair.second)), "pairs")
        pairs = [TextPair(pair.first, pair.second) for pair in given.pairs]
        return SizedTask(PairTask(pairs, limits), size, tenant, param="pairs")

    def _check_size(self, texts: Iterable[str], param: str, given: int = 0) -> int:
        """Return the UTF-8 bytes of the texts. Raises RpcError if they and `given` others are too many."""
        size = sum(len(text.encode()) for text in texts)
        if given + size > self._config.max_text_bytes:
            raise _invalid(
                f"The text has {given + size} bytes; at most {self._config.max_text_bytes} are allowed.",
                param,
            )
        return size


def _tenant(
    request: tokenizer_pb2.RenderRequest | tokenizer_pb2.TokenizeRequest | tokenizer_pb2.DetokenizeRequest,
) -> str:
    """Return the tenant of a request. Raises RpcError."""
    return checked_tenant(request.tenant)


def checked_tenant(tenant: str) -> str:
    """Return a tenant's name that is not too long. Raises RpcError."""
    if len(tenant) > MAX_TENANT:
        raise _invalid(f"A tenant's name has at most {MAX_TENANT} characters.", "tenant")
    return tenant


def _prompt_limits(request: tokenizer_pb2.RenderRequest) -> PromptLimits:
    limit = request.max_prompt_tokens if request.HasField("max_prompt_tokens") else None
    kept = request.truncate_to if request.HasField("truncate_to") else None
    if kept == 0:
        raise _invalid("Of a prompt at least one token must be kept.", "truncate_prompt_tokens")
    first = request.first_tokens if request.HasField("first_tokens") else None
    if first is not None and (kept is not None or first == 0):
        raise _invalid("Of a prompt the first tokens matter, at least one, or the last.", "first_tokens")
    return PromptLimits(limit, kept, first)


def _check_count(count: int, limit: int, what: str, param: str) -> None:
    if count > limit:
        raise _invalid(f"There are {count} {what}; at most {limit} are allowed.", param)
