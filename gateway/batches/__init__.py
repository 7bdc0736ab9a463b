"""Files of requests, run in the background."""

from __future__ import annotations

from gateway.batches.files import FileLimits, FileStore, file_not_found
from gateway.batches.job import JobLimits
from gateway.batches.objects import BATCH_ID, FILE_ID, Batch, BatchPage, FileObject, FilePage
from gateway.batches.runner import BatchRunner, RunnerLimits
from gateway.batches.schema import SCHEMA, VERSION
from gateway.batches.service import BatchLimits, BatchService
from gateway.batches.store import BatchStore
from gateway.batches.upload import UploadForm

__all__ = [
    "BATCH_ID",
    "FILE_ID",
    "SCHEMA",
    "VERSION",
    "Batch",
    "BatchLimits",
    "BatchPage",
    "BatchRunner",
    "BatchService",
    "BatchStore",
    "FileLimits",
    "FileObject",
    "FilePage",
    "FileStore",
    "JobLimits",
    "RunnerLimits",
    "UploadForm",
    "file_not_found",
]
