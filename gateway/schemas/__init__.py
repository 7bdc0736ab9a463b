"""The requests of the API: strict models of what is supported, and a list of what is known and is not."""

from __future__ import annotations

from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.responses import ResponsesRequest
from gateway.schemas.validation import parse_request

__all__ = ["ChatRequest", "CompletionRequest", "RequestLimits", "ResponsesRequest", "parse_request"]
