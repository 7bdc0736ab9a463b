"""Files and batches as the API shows them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.http.answers import Page

FILE_ID = "file-"
BATCH_ID = "batch_"
"""How ids of files and of batches begin."""


class Purpose(StrEnum):
    """The purpose of a file."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class FileObject(msgspec.Struct, kw_only=True):
    """A file. Times are Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: str = "processed"


class BatchStatus(StrEnum):
    """Where a batch is."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing changes any more."""
        return self in FINAL


FINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class BatchProblem(msgspec.Struct):
    """A fault of an input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct):
    data: list[BatchProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Lines in all, and those that were answered with success and without."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix seconds, None for what has not happened."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = BatchStatus.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def moved(self, status: BatchStatus, now: float) -> None:
        """Take a new status, at the time `now`."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now))


class FilePage(Page[FileObject]):
    """A page of files, under the name that the OpenAPI document gives it."""


class BatchPage(Page[Batch]):
    """A page of batches, under the name that the OpenAPI document gives it."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    """The object as JSON."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """What `encode_batch` was given."""
    return _decoder.decode(data)
