"""`/v1/responses`: create, read, cancel and delete; its input; the size of an input."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.auth import owner_of
from gateway.errors import bad_request
from gateway.http.query import choice, integer, query_of
from gateway.http.respond import Deferred
from gateway.parsing import ParserChoice
from gateway.responses import Library, ResponsesService, page, stored_items
from gateway.routes.chat_completions import ChatEndpoint
from gateway.routes.openapi import body_schema, described, properties
from gateway.schemas import ChatRequest, ResponsesRequest
from gateway.schemas.responses import LOGPROBS, PASSED_ON
from gateway.text.models import Model

_JSON = "application/json"
_MAX_LISTED = 100


class ResponsesEndpoint(ChatEndpoint):
    """The chats of responses."""

    id_prefix = "resp-"
    prompt_param = "input"

    def parsing(self, fields: ChatRequest, model: Model) -> ParserChoice:
        choice = super().parsing(fields, model)
        if choice.needed and fields.logprobs:
            # Nobody can tell which tokens were those of the message alone.
            raise bad_request(
                "Log probabilities are not supported by this server where reasoning or calls of tools are "
                "read in the model's text.",
                "logprobs",
                "unsupported_parameter",
            )
        return choice


def routes(service: ResponsesService, library: Library) -> APIRouter:
    """The routes."""
    router = APIRouter()
    further = {name: schema for name, schema in properties(ChatRequest).items() if name in PASSED_ON}
    body = body_schema(ResponsesRequest, further)

    @router.post("/v1/responses", **described("Make a response", body))
    async def create() -> Response:
        return Deferred(service.create)

    @router.post("/v1/responses/input_tokens", **described("Count a response's input tokens", body))
    async def input_tokens() -> Response:
        return Deferred(service.count)

    @router.get("/v1/responses/{response_id}", summary="Read a stored response")
    async def retrieve(request: Request, response_id: str) -> Response:
        query = query_of(request, ("include", "stream"), ("starting_after", "include_obfuscation"))
        if query.get("stream", "false") != "false":
            raise bad_request(
                "The parameter 'stream' is not supported by this server for stored responses.",
                "stream",
                "unsupported_parameter",
            )
        _check_include(query.get("include"))
        record = await library.get(owner_of(request.scope), response_id)
        return Response(record.response, media_type=_JSON)

    @router.delete("/v1/responses/{response_id}", summary="Forget a stored response")
    async def delete(request: Request, response_id: str) -> Response:
        query_of(request, ())
        await service.delete(owner_of(request.scope), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", summary="Stop making a response in the background")
    async def cancel(request: Request, response_id: str) -> Response:
        query_of(request, ())
        return Response(await service.cancel(owner_of(request.scope), response_id), media_type=_JSON)

    @router.get("/v1/responses/{response_id}/input_items", summary="List the input of a stored response")
    async def input_items(request: Request, response_id: str) -> Response:
        query = query_of(request, ("after", "limit", "order", "include"))
        _check_include(query.get("include"))
        order = choice(query, "order", ("desc", "asc"))
        limit = integer(query, "limit", 20, 1, _MAX_LISTED)
        found = stored_items(await library.get(owner_of(request.scope), response_id))
        return JSONResponse(page(found, order=order, limit=limit, after=query.get("after")))

    return router


def _check_include(name: str | None) -> None:
    if name not in (None, LOGPROBS):
        raise bad_request(
            f"The parameter 'include' is not supported by this server for anything but {LOGPROBS}.",
            "include",
            "unsupported_parameter",
        )
