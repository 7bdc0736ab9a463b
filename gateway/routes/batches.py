"""`/v1/batches` and `/v1/files`: create or upload, read, list, cancel or delete."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.auth import caller_of
from gateway.batches.files import FileStore, UploadForm, file_not_found
from gateway.batches.objects import BATCH_ID, FILE_ID, Batch, BatchPage, BatchRequest, FileObject, FilePage
from gateway.batches.service import BatchService
from gateway.http.answers import Call, Deleted, json_response, page_of
from gateway.http.request import Choice, Integer, Text, query_of
from gateway.routing import READS, STORED, Routes

_AFTER_BATCH = Text("after", "Id of the batch after which the list begins.")
_BATCH_LIMIT = Integer("limit", 20, 1, 100)
_BATCH_LIST = (_AFTER_BATCH, _BATCH_LIMIT)


def batch_routes(service: BatchService) -> Routes:
    router = Routes(ids={"batch_id": BATCH_ID})
    batches = service.batches

    @router.post("/v1/batches", "Run a file of requests", Batch, BatchRequest, fails=(*READS, *STORED))
    async def create(call: Call) -> None:
        await service.create(call)

    @router.get("/v1/batches", "List the batches", BatchPage, query=_BATCH_LIST, fails=STORED)
    async def list_batches(request: Request) -> Response:
        query = query_of(request, _BATCH_LIST)
        limit = _BATCH_LIMIT.of(query)
        owner = caller_of(request.scope).owner
        found = await batches.listed(owner, limit=limit + 1, after=_AFTER_BATCH.of(query))
        return json_response(page_of(found, limit))

    @router.get("/v1/batches/{batch_id}", "Describe a batch", Batch, fails=STORED)
    async def retrieve(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.get(caller_of(request.scope).owner, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", "End a batch", Batch, fails=STORED)
    async def cancel(request: Request, batch_id: str) -> Response:
        query_of(request, ())
        return json_response(await batches.cancel(caller_of(request.scope).owner, batch_id))

    return router


_BYTES = "application/octet-stream"
_AFTER_FILE = Text("after", "Id of the file after which the list begins.")
_FILE_LIMIT = Integer("limit", 10_000, 1, 10_000)
_ORDER = Choice("order", ("desc", "asc"))
_PURPOSE = Text("purpose", "List files of this purpose alone.")
_FILE_LIST = (_AFTER_FILE, _FILE_LIMIT, _ORDER, _PURPOSE)


def file_routes(service: BatchService) -> Routes:
    router = Routes(ids={"file_id": FILE_ID})
    files = service.files

    @router.post("/v1/files", "Upload a file of requests", FileObject, form=UploadForm, fails=(*READS, 507))
    async def upload(call: Call) -> None:
        await service.upload(call)

    @router.get("/v1/files", "List the files", FilePage, query=_FILE_LIST, fails=STORED)
    async def list_files(request: Request) -> Response:
        query = query_of(request, _FILE_LIST)
        limit = _FILE_LIMIT.of(query)
        found = await files.listed(
            caller_of(request.scope).owner,
            purpose=_PURPOSE.of(query),
            limit=limit + 1,
            after=_AFTER_FILE.of(query),
            newest_first=_ORDER.of(query) == "desc",
        )
        return json_response(page_of(found, limit))

    @router.get("/v1/files/{file_id}", "Describe a file", FileObject, fails=STORED)
    async def retrieve(request: Request, file_id: str) -> Response:
        query_of(request, ())
        return json_response(await files.get(caller_of(request.scope).owner, file_id))

    @router.get("/v1/files/{file_id}/content", "Read a file", bytes, media_type=_BYTES, fails=STORED)
    async def content(request: Request, file_id: str) -> Response:
        query_of(request, ())
        file = await files.get(caller_of(request.scope).owner, file_id)
        # Whatever it holds, no browser is to show it as a page. No length is told: a client that has read so
        # much might ask again before the answer has ended, and its connection would be closed.
        headers = {"x-content-type-options": "nosniff"}
        return StreamingResponse(_whole(files, file), media_type=_BYTES, headers=headers)

    @router.delete("/v1/files/{file_id}", "Forget a file", Deleted, fails=(*STORED, 409))
    async def delete(request: Request, file_id: str) -> Response:
        query_of(request, ())
        await files.delete(caller_of(request.scope).owner, file_id)
        return json_response(Deleted(file_id, "file"))

    return router


async def _whole(files: FileStore, file: FileObject) -> AsyncIterator[bytes]:
    sent = 0
    async for piece in files.content(file.id):
        sent += len(piece)
        yield piece
    if sent != file.bytes:
        # It was deleted meanwhile: the connection is cut, so that the beginning is not taken for all of it.
        raise file_not_found()
