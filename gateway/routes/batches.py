"""`/v1/batches`: create, read, list and cancel."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import owner_of
from gateway.batches.objects import BATCH_ID, Batch, BatchPage
from gateway.batches.service import BatchService
from gateway.http.answers import json_response, page_of
from gateway.http.query import Integer, Text, query_of
from gateway.http.respond import Deferred
from gateway.openapi.operation import READS, STORED, operation
from gateway.openapi.routing import Routes
from gateway.schemas.batches import BatchRequest

_AFTER = Text("after", "Id of the batch after which the list begins.")
_LIMIT = Integer("limit", 20, 1, 100)
_LIST = (_AFTER, _LIMIT)


def routes(service: BatchService) -> Routes:
    """The routes."""
    router = Routes(ids={"batch_id": BATCH_ID})
    batches = service.batches

    @router.post(
        "/v1/batches",
        operation("Run a file of requests", Batch, BatchRequest, fails=(*READS, *STORED)),
    )
    async def create() -> Response:
        return Deferred(service.create)

    @router.get("/v1/batches", operation("List the batches", BatchPage, query=_LIST, fails=STORED))
    async def list_batches(request: Request) -> Response:
        query = query_of(request, _LIST)
        limit = _LIMIT.of(query)
        owner = owner_of(request.scope)
        found = await batches.listed(owner, limit=limit + 1, after=_AFTER.of(query))
        return json_response(page_of(found, limit))

    @router.get("/v1/batches/{batch_id}", operation("Describe a batch", Batch, fails=STORED))
    async def retrieve(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.get(owner_of(request.scope), batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", operation("End a batch", Batch, fails=STORED))
    async def cancel(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.cancel(owner_of(request.scope), batch_id))

    return router
