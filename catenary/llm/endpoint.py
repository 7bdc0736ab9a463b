"""Prompts of an offline batch, as a request."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from catenary.schema import MAX_TOP_LOGPROBS
from gateway.routes.completions import CompletionEndpoint
from gateway.schemas import CompletionRequest, RequestLimits, parse_request


class OfflineRequest(CompletionRequest):
    """A completion for which the API's bounds of log probabilities are not meant."""

    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class OfflineEndpoint(CompletionEndpoint):
    """Prompts as token ids."""

    id_prefix = "offline-"
    # As vLLM's: without a limit, to the end of the context.
    default_max_tokens = None

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> OfflineRequest:
        return parse_request(OfflineRequest, body, limits)
