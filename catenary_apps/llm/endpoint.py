"""Prompts, documents and pairs of an offline batch, as requests."""

from __future__ import annotations

from pydantic import Field

from catenary.parameters import TEMPERATURE
from catenary.sequence_limits import MAX_TOP_LOGPROBS
from gateway import bad_request
from gateway.pooling.work import Work, vector_width
from gateway.schemas.base import RequestLimits
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.pooling import PooledFields
from gateway.text.models import Model

LIMITS = RequestLimits(max_n=128)
"""Bounds of a request. The calling program itself makes the requests, so only resources limit them."""


class OfflineRequest(CompletionRequest):
    """A completion for which the API's bounds of temperatures and log probabilities are not meant."""

    temperature: float | None = Field(None, ge=TEMPERATURE.low, allow_inf_nan=False)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    detokenize: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.detokenize is False and self.stops:
            raise bad_request(
                "'stop' needs 'detokenize': stop strings are looked for in the decoded text.",
                "stop",
            )


class DocumentFields(PooledFields):
    """A document, as a text or as token ids, and what is to become of it."""

    prompt: str | list[int] = Field(min_length=1)
    dimensions: int | None = Field(None, ge=1)


class PairFields(PooledFields):
    """As many first texts as second ones, to be compared."""

    first: list[str] = Field(min_length=1)
    second: list[str] = Field(min_length=1)


def document_work(fields: DocumentFields, model: Model) -> Work:
    """Return the work for one document, by the first of the model's tasks. Raises ApiError 400."""
    prompt = fields.prompt
    return Work(
        model.info.tasks[0],
        "prompt",
        texts=[prompt] if isinstance(prompt, str) else (),
        ids=[] if isinstance(prompt, str) else [prompt],
        dimensions=vector_width(fields.dimensions, model),
        truncate=fields.truncate_prompt_tokens,
        raw=fields.raw,
    )
