"""`/v1/responses`: create, read, cancel and delete; its input; the size of an input."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import caller_of
from gateway.errors import bad_request
from gateway.http.answers import Call, Deleted, json_response, send_json
from gateway.http.request import Choice, Integer, Text, query_of
from gateway.responses.events import ResponseEvent
from gateway.responses.objects import InputTokens, ItemPage
from gateway.responses.objects import Response as ResponseObject
from gateway.responses.request import ID_PREFIX
from gateway.responses.service import Library, ResponsesService, page, stored_items
from gateway.routing import ASKS, STORED, Routes
from gateway.schemas.chat import ChatRequest
from gateway.schemas.ignored import current_ignored, unsupported_parameter
from gateway.schemas.responses import (
    CHAT_PARAMETERS,
    INCLUDABLE,
    OUTPUT_LOGPROBS,
    ResponsesRequest,
)

_JSON = "application/json"
_INCLUDE = Choice("include", INCLUDABLE, optional=True)
_STREAM = Choice("stream", ("false", "true"))
_STARTING_AFTER = Integer("starting_after", -1, 0, 999_999_999, optional=True)
_OBFUSCATION = Choice("include_obfuscation", ("false",))
_READ = (_INCLUDE, _STREAM, _STARTING_AFTER, _OBFUSCATION)
_AFTER = Text("after", "Id of the item after which the list begins.")
_LIMIT = Integer("limit", 20, 1, 100)
_ORDER = Choice("order", ("desc", "asc"))
_LIST = (_AFTER, _LIMIT, _ORDER, _INCLUDE)


def response_routes(service: ResponsesService, library: Library) -> Routes:
    router = Routes(ids={"response_id": ID_PREFIX})
    _making(router, service)
    _stored(router, service, library)
    return router


def _making(router: Routes, service: ResponsesService) -> None:
    """Declare the routes that take a request for a response."""
    further = (ChatRequest, CHAT_PARAMETERS)

    @router.post(
        "/v1/responses",
        "Make a response",
        ResponseObject,
        ResponsesRequest,
        event=ResponseEvent,
        further=further,
        fails=(*ASKS, 507),
        limited=True,
    )
    async def create(call: Call) -> None:
        await service.create(call)

    @router.post(
        "/v1/responses/input_tokens",
        "Count a response's input tokens",
        InputTokens,
        ResponsesRequest,
        further=further,
        fails=ASKS,
        limited=False,
    )
    async def input_tokens(call: Call) -> None:
        await service.count(call)


def _stored(router: Routes, service: ResponsesService, library: Library) -> None:

    @router.get(
        "/v1/responses/{response_id}",
        "Read a stored response",
        ResponseObject,
        event=ResponseEvent,
        query=_READ,
        fails=(*STORED, 429),
    )
    async def retrieve(call: Call, response_id: str) -> None:
        request = Request(call.scope)
        query = query_of(request, _READ)
        _check_include(query.get("include"))
        if query.get(_OBFUSCATION.name, "false") != "false":
            raise unsupported_parameter(_OBFUSCATION.name)
        owner = caller_of(call.scope).owner
        if _STREAM.of(query) == "true":
            await service.follow(owner, response_id, _STARTING_AFTER.of(query), call)
            return
        if _STARTING_AFTER.name in query:
            raise bad_request("'starting_after' is only allowed when 'stream' is true.", "starting_after")
        await send_json(call.send, (await library.get(owner, response_id)).response)

    @router.delete("/v1/responses/{response_id}", "Forget a stored response", Deleted, fails=STORED)
    async def delete(request: Request, response_id: str) -> Response:
        query_of(request, ())
        await service.delete(caller_of(request.scope).owner, response_id)
        return json_response(Deleted(response_id, "response"))

    @router.post(
        "/v1/responses/{response_id}/cancel",
        "Stop making a response in the background",
        ResponseObject,
        fails=STORED,
    )
    async def cancel(request: Request, response_id: str) -> Response:
        query_of(request, ())
        return Response(await service.cancel(caller_of(request.scope).owner, response_id), media_type=_JSON)

    @router.get(
        "/v1/responses/{response_id}/input_items",
        "List the input of a stored response",
        ItemPage,
        query=_LIST,
        fails=STORED,
    )
    async def input_items(request: Request, response_id: str) -> Response:
        query = query_of(request, _LIST)
        _check_include(query.get("include"))
        order, limit, after = _ORDER.of(query), _LIMIT.of(query), _AFTER.of(query)
        found = stored_items(await library.get(caller_of(request.scope).owner, response_id))
        return json_response(page(found, order=order, limit=limit, after=after))


def _check_include(name: str | None) -> None:
    if name is not None and name not in INCLUDABLE:
        raise unsupported_parameter("include")
    if name not in (None, OUTPUT_LOGPROBS):
        current_ignored().note("include")
