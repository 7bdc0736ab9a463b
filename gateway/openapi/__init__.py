"""The OpenAPI document: derived from what the routes read and write, never written beside it."""

from __future__ import annotations

from gateway.openapi.direct import DirectRoutes
from gateway.openapi.document import document
from gateway.openapi.operation import ASKS, READS, STORED, Operation, operation
from gateway.openapi.routing import DescribedRoute, Routes

__all__ = [
    "ASKS",
    "READS",
    "STORED",
    "DescribedRoute",
    "DirectRoutes",
    "Operation",
    "Routes",
    "document",
    "operation",
]
