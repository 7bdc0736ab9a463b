"""Upload of files and creation of batches."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from catenary.telemetry import new_id
from gateway.batches.files import FileStore, Upload, declared_bytes, read_upload
from gateway.batches.objects import (
    BATCH_ID,
    FILE_ID,
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    Batch,
    BatchRequest,
    Purpose,
)
from gateway.batches.runner import BatchRunner
from gateway.batches.store import BatchStore, ClaimedBatch
from gateway.errors import ApiError, bad_request
from gateway.generation.requests import Requests
from gateway.http.answers import Call, send_json
from gateway.schemas.base import parse_request


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bytes of an uploaded file, seconds for its upload, seconds for which results are kept."""

    max_file_bytes: int
    upload_s: float
    keep_s: float


class BatchService:
    """Service that accepts files and batches. Methods raise ApiError; 503 if the store does not answer."""

    def __init__(
        self,
        requests: Requests,
        *,
        files: FileStore,
        batches: BatchStore,
        runner: BatchRunner,
        limits: BatchLimits,
    ) -> None:
        self._requests = requests
        self.files = files
        self.batches = batches
        self.runner = runner
        self._limits = limits

    async def upload(self, call: Call) -> None:
        """Store the file of a form. Raise ApiError or ClientGone, and store nothing then."""
        request, file_id = Request(call.scope, call.receive), new_id(FILE_ID)
        async with self._requests.active(call) as active:
            owner = active.caller.owner
            await self.files.begin(owner, file_id, declared_bytes(request, self._limits.max_file_bytes))
            try:
                upload = await read_upload(
                    request,
                    lambda number, data: self.files.append(file_id, number, data),
                    max_bytes=self._limits.max_file_bytes,
                    timeout_s=self._limits.upload_s,
                )
                expires_s = _checked(upload)
                file = await self.files.finish(owner, file_id, upload.filename, expires_s)
            except BaseException:
                # A sweep deletes later what cannot be discarded now.
                with suppress(ApiError):
                    await self.files.discard(file_id)
                raise
            await send_json(call.send, msgspec.json.encode(file))

    async def create(self, call: Call) -> None:
        async with self._requests.active(call) as active:
            request = parse_request(BatchRequest, await active.json_object(), self._requests.limits)
            endpoints = self.runner.endpoints
            if request.endpoint not in endpoints:
                raise bad_request(f"Invalid 'endpoint': must be one of {', '.join(endpoints)}.", "endpoint")
            caller, now = active.caller, time.time()
            file = await self.files.get(caller.owner, request.input_file_id)
            if file.purpose is not Purpose.BATCH:
                raise bad_request(
                    "Invalid 'input_file_id': the file's purpose is not batch.", "input_file_id"
                )
            batch = Batch(
                id=new_id(BATCH_ID),
                endpoint=request.endpoint,
                input_file_id=file.id,
                completion_window=request.completion_window,
                created_at=int(now),
                expires_at=int(now + request.window_s),
                metadata=request.metadata,
            )
            claim = ClaimedBatch(batch, caller.owner, caller.cache_salt, new_id(FILE_ID), new_id(FILE_ID))
            after = request.output_expires_after
            await self.batches.add(claim, self._limits.keep_s if after is None else float(after.seconds))
            self.runner.wake()
            await send_json(call.send, msgspec.json.encode(batch))


def _checked(upload: Upload) -> float | None:
    """Return seconds until the file expires; None: never. Raise ApiError 400 for a bad form."""
    fields = dict(upload.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise bad_request("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
    if purpose != Purpose.BATCH.value:
        raise bad_request("Invalid 'purpose': only batch is supported by this server.", "purpose")
    if not upload.size:
        raise bad_request("Invalid 'file': it is empty.", "file")
    if not fields:
        return None
    seconds = fields.get("expires_after[seconds]", "")
    if fields.get("expires_after[anchor]") != "created_at":
        raise bad_request("Invalid 'expires_after': its anchor must be created_at.", "expires_after.anchor")
    if not (seconds.isascii() and seconds.isdecimal() and MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S):
        raise bad_request(
            f"Invalid 'expires_after': its seconds must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.",
            "expires_after.seconds",
        )
    return float(int(seconds))
