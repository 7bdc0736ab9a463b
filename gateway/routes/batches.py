"""`/v1/batches`: create, read, list and cancel."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import owner_of
from gateway.batches import BatchService
from gateway.http.query import integer, query_of
from gateway.http.respond import Deferred
from gateway.routes.listing import json_response, listing
from gateway.routes.openapi import ERRORS, operation
from gateway.schemas.batches import BatchRequest

_MAX_LISTED = 100


def routes(service: BatchService) -> APIRouter:
    """The routes."""
    router = APIRouter()
    batches = service.batches

    @router.post("/v1/batches", **operation(BatchRequest, "Run a file of requests"))
    async def create() -> Response:
        return Deferred(service.create)

    @router.get("/v1/batches", summary="List the batches", responses=ERRORS)
    async def list_batches(request: Request) -> Response:
        query = query_of(request, ("after", "limit"))
        limit = integer(query, "limit", 20, 1, _MAX_LISTED)
        owner = owner_of(request.scope)
        return listing(await batches.listed(owner, limit=limit + 1, after=query.get("after")), limit)

    @router.get("/v1/batches/{batch_id}", summary="Describe a batch", responses=ERRORS)
    async def retrieve(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.get(owner_of(request.scope), batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", summary="End a batch", responses=ERRORS)
    async def cancel(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.cancel(owner_of(request.scope), batch_id))

    return router
