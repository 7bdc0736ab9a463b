"""Checked request for a response: the chat that it becomes, and the response object that answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET

from catenary.telemetry import new_id
from gateway.auth import Caller
from gateway.errors import ApiError, bad_request
from gateway.generation.chat import prepare_chat
from gateway.generation.plan import Prepared
from gateway.responses import objects
from gateway.responses.objects import Response, ResponseStatus
from gateway.responses.store import StoredResponse
from gateway.schemas import response_items as schema
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.ignored import current_ignored
from gateway.schemas.responses import (
    BY_CHAT_NAME,
    CHAT_PARAMETERS,
    OTHER_TOOLS,
    ReasoningOptions,
    ResponseChat,
    ResponsesRequest,
    ResponseTool,
)
from gateway.text.models import Model

T = TypeVar("T")


_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def input_items(
    items: Sequence[schema.InputItem], new_id: Callable[[str], str], stored: Mapping[str, objects.Item]
) -> list[objects.Item]:
    """Return the items of a request; items without an id get one.

    `stored`: the items that references refer to, by their ids."""
    return [
        stored[item.id]
        if isinstance(item, schema.ItemReference)
        else _input_item(item, item.id or new_id(_PREFIXES[item.type]))
        for item in items
    ]


def references(items: Sequence[schema.InputItem]) -> dict[int, str]:
    """Return the ids of the stored items that an input refers to, by their places."""
    return {place: item.id for place, item in enumerate(items) if isinstance(item, schema.ItemReference)}


def _input_item(item: schema.WholeItem, item_id: str) -> objects.Item:
    status = item.status or objects.COMPLETED
    if isinstance(item, schema.MessageItem):
        kind = objects.OutputText if item.role == "assistant" else objects.InputText
        parts = [kind(part.text) for part in item.content]
        return objects.ResponseMessage(
            item_id, item.role, parts, status, UNSET if item.phase is None else item.phase
        )
    if isinstance(item, schema.FunctionCallItem):
        return objects.FunctionCall(item_id, item.call_id, item.name, item.arguments, status)
    if isinstance(item, schema.FunctionCallOutputItem):
        output = [objects.InputText(part.text) for part in item.output]
        return objects.FunctionCallOutput(item_id, item.call_id, output, status)
    return objects.Reasoning(
        item_id,
        [objects.SummaryText(part.text) for part in item.summary],
        [objects.ReasoningText(part.text) for part in item.content or ()],
        status,
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Fields of a response's request that a message of the chat was made from."""

    item: str
    """Field of its (last) item."""
    calls: tuple[str, ...] = ()
    """Field of each of its calls."""


class _Turn:
    """One turn of the model: reasoning, text and calls, which are one message of a chat."""

    def __init__(self) -> None:
        self._origin = ""
        self._call_origins: list[str] = []
        self._reasoning: list[str] = []
        self._texts: list[str] | None = None
        self._calls: list[dict[str, Any]] = []

    def takes(self, item: objects.OutputItem) -> bool:
        """Return whether `item` continues the turn, in the order in which models generate."""
        if isinstance(item, objects.Reasoning):
            return self._texts is None and not self._calls
        return isinstance(item, objects.FunctionCall) or (self._texts is None and not self._calls)

    def add(self, item: objects.OutputItem, origin: str) -> None:
        self._origin = origin
        if isinstance(item, objects.Reasoning):
            self._reasoning += [part.text for part in item.content]
        elif isinstance(item, objects.FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
            self._call_origins.append(origin)
        else:
            self._texts = [part.text for part in item.content]

    @property
    def origin(self) -> Origin:
        return Origin(self._origin, tuple(self._call_origins))

    def message(self) -> dict[str, Any]:
        content = "".join(self._texts) if self._texts is not None else None
        made: dict[str, Any] = {"role": "assistant", "content": content}
        if content is None and not self._calls:
            made["content"] = ""
        if self._reasoning:
            made["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            made["tool_calls"] = self._calls
        return made


def chat_messages(
    conversation: Iterable[tuple[objects.Item, str]],
) -> Iterator[tuple[dict[str, Any], Origin]]:
    """Yield the messages of a chat with their origins; `conversation`: items with their fields."""
    turn: _Turn | None = None
    for item, origin in conversation:
        if isinstance(item, objects.FunctionCallOutput) or (
            isinstance(item, objects.ResponseMessage) and item.role != "assistant"
        ):
            if turn is not None:
                yield turn.message(), turn.origin
                turn = None
            yield _message(item), Origin(origin)
            continue
        if turn is not None and not turn.takes(item):
            yield turn.message(), turn.origin
            turn = None
        turn = turn or _Turn()
        turn.add(item, origin)
    if turn is not None:
        yield turn.message(), turn.origin


def _message(item: objects.ResponseMessage | objects.FunctionCallOutput) -> dict[str, Any]:
    if isinstance(item, objects.ResponseMessage):
        return {"role": item.role, "content": _content([part.text for part in item.content])}
    texts = [item.output] if isinstance(item.output, str) else [part.text for part in item.output]
    return {"role": "tool", "tool_call_id": item.call_id, "content": _content(texts)}


def _content(texts: list[str]) -> Any:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


PREVIOUS = "previous_response_id"
INSTRUCTIONS = "instructions"
_INPUT = "input."
# Parameters that are the same in chats.
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
    """Fields of a response's request, for each message of its chat, and places of its tools."""

    messages: Sequence[Origin]
    tools: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The body of a chat, and the fields that it was made from."""

    body: dict[str, Any]
    origins: Origins


def chat_body(
    request: ResponsesRequest,
    history: Sequence[objects.Item],
    items: Sequence[objects.Item],
    extensions: dict[str, Any],
) -> ChatBody:
    """Return the chat that answers a request.

    Args:
        request: the request.
        history: items of the responses before it.
        items: its own input.
        extensions: parameters of chats that the request has in addition to its own.
    """
    messages: list[dict[str, Any]] = []
    origins: list[Origin] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        origins.append(Origin(INSTRUCTIONS))
    sources = [PREVIOUS] * len(history) + [f"{_INPUT}{index}" for index in range(len(items))]
    for message, origin in chat_messages(zip([*history, *items], sources, strict=True)):
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
    """Convert a tool for chats, in which the function is an object of its own."""
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
    """Return whether the chat is to check an allowed tool: a function, or nothing that is known."""
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
    """Convert an error of the chat: name the fields that the client sent."""
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
    """Return the item that a field of a message was made from; for a call, with the function's field."""
    match field:
        case ("tool_calls", index, *rest) if index.isdecimal() and int(index) < len(origin.calls):
            item = origin.calls[int(index)]
            # Items of stored responses are not named: the client did not send them now.
            names = [name for name in rest if name != "function"] if item.startswith(_INPUT) else []
            return ".".join([item, *names])
    return origin.item


ID_PREFIX = "resp_"
_CUT = "truncate_prompt_tokens"
# Temperature and top_p that leave the model's probabilities as they are.
_UNCHANGED = 1.0


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """Request that is answered: `response` is filled in; `items` is its own input."""

    chat: ResponseChat
    origins: Origins
    items: list[objects.Item]
    response: Response
    owner: str
    stream: bool

    def renamed(self, error: ApiError) -> ApiError:
        """Convert an error of the chat to one of this request."""
        return of_response(error, self.origins)

    def prepared(self, model: Model, caller: Caller) -> Prepared:
        prepared = prepare_chat(
            self.chat,
            model,
            caller,
            id_prefix="resp-",
            prompt_param="input",
            drops_turns=self.chat.truncation is not None,
        )
        if prepared.parsing.needed and self.chat.logprobs:
            # The tokens of the message alone cannot be told apart.
            raise bad_request(
                "Log probabilities are not supported by this server where reasoning or calls of tools are "
                "read in the model's text.",
                "logprobs",
                "unsupported_parameter",
            )
        return prepared

    def settle(self, model: Model) -> None:
        """Fill in the sampling that the request leaves to the model's generation_config.json."""
        info = model.info
        if self.chat.temperature is None and info.HasField("default_temperature"):
            self.response.temperature = info.default_temperature
        if self.chat.top_p is None and info.HasField("default_top_p"):
            self.response.top_p = info.default_top_p

    def record(self, runner: str | None = None) -> StoredResponse:
        """Return the record of the response as it is now; `runner` makes it in the background."""
        response = self.response
        return StoredResponse(
            response.id,
            self.owner,
            response.status,
            response.previous_response_id,
            objects.encode_response(response),
            objects.encode_items(self.items),
            runner,
        )

    async def written(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, which runs in a thread if it may take long."""
        if not self.chat.logprobs:
            return write()
        # Encoding tens of thousands of alternatives would block the loop.
        return await asyncio.to_thread(write)


def read_request(body: dict[str, Any], limits: RequestLimits) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Split a body into its own parameters, checked, and those of the chat. Raise ApiError 400."""
    passed_on = {name: value for name, value in body.items() if name in CHAT_PARAMETERS}
    own = {name: value for name, value in body.items() if name not in CHAT_PARAMETERS}
    request = parse_request(ResponsesRequest, own, limits)
    if request.truncation == "auto" and passed_on.get(_CUT) is not None:
        raise bad_request(f"'{_CUT}' is not allowed when 'truncation' is 'auto'.", _CUT)
    return request, passed_on


def response_request(
    request: ResponsesRequest,
    passed_on: dict[str, Any],
    history: Sequence[objects.Item],
    stored: Mapping[str, objects.Item],
    *,
    limits: RequestLimits,
    owner: str,
    store: bool,
) -> ResponseRequest:
    """Return a request with its chat and its response. Raise ApiError 400.

    Args:
        request: the request.
        passed_on: its parameters for the chat.
        history: items of the conversation before its input.
        stored: items that its input refers to.
        limits: of the operator.
        owner: the tenant.
        store: whether the response will be stored.
    """
    items = input_items(request.input, new_id, stored)
    made = chat_body(request, history, items, passed_on)
    try:
        chat = parse_request(ResponseChat, made.body, limits)
    except ApiError as error:
        raise of_response(error, made.origins) from None
    response = _response(request, chat, store=store)
    return ResponseRequest(chat, made.origins, items, response, owner, bool(request.stream))


def _or(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _response(request: ResponsesRequest, chat: ResponseChat, *, store: bool) -> Response:
    text = request.text
    form = text.format if text is not None else None
    thought = request.reasoning or ReasoningOptions()
    effort, summary = thought.effort, thought.summary or thought.generate_summary
    tier = request.service_tier
    return Response(
        id=new_id(ID_PREFIX),
        created_at=int(time.time()),
        status=ResponseStatus.QUEUED if request.background else ResponseStatus.IN_PROGRESS,
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        max_tool_calls=request.max_tool_calls,
        reasoning={"effort": effort, "summary": summary},
        safety_identifier=request.safety_identifier,
        service_tier="default" if tier in (None, "auto") else tier,
        store=store,
        temperature=_or(chat.temperature, _UNCHANGED),
        presence_penalty=_or(chat.presence_penalty, 0.0),
        frequency_penalty=_or(chat.frequency_penalty, 0.0),
        text={
            "format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True),
            "verbosity": (text and text.verbosity) or "medium",
        },
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[tool.model_dump() for tool in request.functions.values()],
        top_logprobs=request.top_logprobs or 0,
        top_p=_or(chat.top_p, _UNCHANGED),
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )
