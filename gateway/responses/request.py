"""A checked request for a response: the chat that it becomes, and the object that will be its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from catenary.telemetry import new_id
from gateway.errors import ApiError, bad_request
from gateway.generation.endpoint import Endpoint
from gateway.responses import items
from gateway.responses.conversion import Origins, chat_body, of_response
from gateway.responses.given import given_items
from gateway.responses.objects import Response, ResponseStatus
from gateway.schemas.chat import ChatRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.responses import CHAT_PARAMETERS, ReasoningOptions, ResponsesRequest
from gateway.schemas.validation import parse_request
from gateway.text.models import Model

ID_PREFIX = "resp_"
_CUT = "truncate_prompt_tokens"
# Temperature and top_p that leave the model's probabilities as they are.
_UNCHANGED = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request on its way. `response` fills up; `given` is the request's own input."""

    chat: ChatRequest
    origins: Origins
    given: list[items.Item]
    response: Response
    owner: str
    stream: bool

    def renamed(self, error: ApiError) -> ApiError:
        """An error of the chat as one of this request."""
        return of_response(error, self.origins)

    def settle(self, model: Model) -> None:
        """Tell in the response the sampling that it is made with, where the request leaves it to the model's
        generation_config.json."""
        info = model.info
        if self.chat.temperature is None and info.HasField("default_temperature"):
            self.response.temperature = info.default_temperature
        if self.chat.top_p is None and info.HasField("default_top_p"):
            self.response.top_p = info.default_top_p

    async def written(self, write: Callable[[], T]) -> T:
        """What `write` makes of the response; beside the loop if that may take long."""
        if not self.chat.logprobs:
            return write()
        # Tens of thousands of alternatives take long to write, and others wait for the loop.
        return await asyncio.to_thread(write)


def read_request(body: dict[str, Any], limits: RequestLimits) -> tuple[ResponsesRequest, dict[str, Any]]:
    """A body as its own parameters, checked, and those that it has for the chat. Raises ApiError 400."""
    passed_on = {name: value for name, value in body.items() if name in CHAT_PARAMETERS}
    own = {name: value for name, value in body.items() if name not in CHAT_PARAMETERS}
    request = parse_request(ResponsesRequest, own, limits)
    if request.truncation == "auto" and passed_on.get(_CUT) is not None:
        raise bad_request(f"'{_CUT}' is not allowed when 'truncation' is 'auto'.", _CUT)
    return request, passed_on


def response_request(
    request: ResponsesRequest,
    passed_on: dict[str, Any],
    history: Sequence[items.Item],
    stored: Mapping[str, items.Item],
    *,
    endpoint: Endpoint[ChatRequest],
    limits: RequestLimits,
    owner: str,
    store: bool,
) -> ResponseRequest:
    """The chat of a request and its answer to be. Raises ApiError 400.

    Args:
        request: the request.
        passed_on: its parameters for the chat.
        history: the items that came before its input.
        stored: the items that its input refers to.
        endpoint: how chats are parsed.
        limits: of the operator.
        owner: whose it is.
        store: whether the response will be stored.
    """
    given = given_items(request.input, new_id, stored)
    made = chat_body(request, history, given, passed_on)
    try:
        chat = endpoint.parse(made.body, limits)
    except ApiError as error:
        raise of_response(error, made.origins) from None
    response = _response(request, chat, store=store)
    return ResponseRequest(chat, made.origins, given, response, owner, bool(request.stream))


def _or(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _response(request: ResponsesRequest, chat: ChatRequest, *, store: bool) -> Response:
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
