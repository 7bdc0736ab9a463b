"""`/v1/files`: upload, list, read and delete."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.auth import owner_of
from gateway.batches import BatchService, FileObject, FileStore, file_not_found
from gateway.http.query import choice, integer, query_of
from gateway.http.respond import Deferred
from gateway.routes.listing import json_response, listing
from gateway.routes.openapi import ERRORS

_MAX_LISTED = 10_000
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def routes(service: BatchService) -> APIRouter:
    """The routes."""
    router = APIRouter()
    files = service.files

    @router.post("/v1/files", summary="Upload a file of requests", responses=ERRORS, openapi_extra=_FORM)
    async def upload() -> Response:
        return Deferred(service.upload)

    @router.get("/v1/files", summary="List the files", responses=ERRORS)
    async def list_files(request: Request) -> Response:
        query = query_of(request, ("after", "limit", "order", "purpose"))
        limit = integer(query, "limit", _MAX_LISTED, 1, _MAX_LISTED)
        found = await files.listed(
            owner_of(request.scope),
            purpose=query.get("purpose"),
            limit=limit + 1,
            after=query.get("after"),
            newest_first=choice(query, "order", ("desc", "asc")) == "desc",
        )
        return listing(found, limit)

    @router.get("/v1/files/{file_id}", summary="Describe a file", responses=ERRORS)
    async def retrieve(request: Request, file_id: str) -> Response:
        query_of(request, ())
        return json_response(await files.get(owner_of(request.scope), file_id))

    @router.get("/v1/files/{file_id}/content", summary="Read a file", responses=ERRORS)
    async def content(request: Request, file_id: str) -> Response:
        query_of(request, ())
        file = await files.get(owner_of(request.scope), file_id)
        # Whatever it holds, no browser is to show it as a page. No length is told: a client that has read so
        # much might ask again before the answer has ended, and its connection would be closed.
        headers = {"x-content-type-options": "nosniff"}
        return StreamingResponse(_whole(files, file), media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", summary="Forget a file", responses=ERRORS)
    async def delete(request: Request, file_id: str) -> Response:
        query_of(request, ())
        await files.delete(owner_of(request.scope), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


async def _whole(files: FileStore, file: FileObject) -> AsyncIterator[bytes]:
    sent = 0
    async for piece in files.content(file.id):
        sent += len(piece)
        yield piece
    if sent != file.bytes:
        # It was deleted meanwhile: the connection is cut, so that nobody takes the beginning for all of it.
        raise file_not_found()
