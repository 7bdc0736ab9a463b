"""Files and batches as the API takes and shows them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from gateway.errors import bad_request
from gateway.http.answers import Page
from gateway.schemas.base import RequestLimits, RequestModel, at_most

# OpenAI's own, in its API reference; a week for the completion window.
MAX_FILE_ID = 128
MAX_HOURS = 168
_MAX_KEY = 64
_MAX_VALUE = 512
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000


class ExpiresAfter(RequestModel):
    """When result files are forgotten."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class BatchRequest(RequestModel):
    """A file of requests to run."""

    input_file_id: str = Field(min_length=1, max_length=MAX_FILE_ID, description="A file of purpose batch.")
    endpoint: str = Field(max_length=64, description="Where all of its requests go.")
    completion_window: str = Field(max_length=8, description="Hours in which it is to be done, as in 24h.")
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, description="Kept with the batch.")
    output_expires_after: Annotated[ExpiresAfter | None, at_most(16)] = None

    @property
    def window_s(self) -> float:
        """The completion window in seconds."""
        return float(int(self.completion_window[:-1]) * 3600)

    def check(self, limits: RequestLimits) -> None:
        digits, unit = self.completion_window[:-1], self.completion_window[-1:]
        if unit != "h" or not (digits.isascii() and digits.isdecimal()) or not 0 < int(digits) <= MAX_HOURS:
            raise bad_request(
                f"Invalid 'completion_window': must be 1h to {MAX_HOURS}h, as in 24h.", "completion_window"
            )
        if any(
            len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in (self.metadata or {}).items()
        ):
            raise bad_request(
                f"Invalid 'metadata': keys must have at most {_MAX_KEY} characters and values at most "
                f"{_MAX_VALUE}.",
                "metadata",
            )


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
    """State of a batch, from its validation to its end."""

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
        """Whether it has ended."""
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


encode_batch: Callable[[Batch], bytes] = msgspec.json.Encoder().encode
decode_batch: Callable[[bytes], Batch] = msgspec.json.Decoder(Batch).decode
