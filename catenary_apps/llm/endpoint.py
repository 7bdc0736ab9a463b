"""Prompts, documents and pairs of an offline batch, as requests."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from catenary.parameters import TEMPERATURE
from catenary.sequence_limits import MAX_TOP_LOGPROBS
from catenary.v1 import common_pb2
from gateway import bad_request
from gateway.pooling.answers import compare
from gateway.pooling.service import PooledTask
from gateway.pooling.work import Work, vector_width
from gateway.routes.completions import CompletionEndpoint
from gateway.schemas.base import RequestLimits
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.pooling import PooledFields
from gateway.schemas.validation import parse_request
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


class OfflineEndpoint(CompletionEndpoint):
    """Prompts as token ids."""

    id_prefix = "offline-"
    # As vLLM's: without a limit, to the end of the context.
    default_max_tokens = None

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> OfflineRequest:
        return parse_request(OfflineRequest, body, limits)


class DocumentFields(PooledFields):
    """A document, as a text or as token ids, and what is to become of it."""

    prompt: str | list[int] = Field(min_length=1)
    dimensions: int | None = Field(None, ge=1)


class PairFields(PooledFields):
    """As many first texts as second ones, to be compared."""

    first: list[str] = Field(min_length=1)
    second: list[str] = Field(min_length=1)


class DocumentTask(PooledTask[DocumentFields]):
    """One document; of a model that may be for any of these tasks."""

    id_prefix = "offline-"

    def __init__(self, tasks: tuple[int, ...]) -> None:
        self.tasks = tasks  # type: ignore[misc]

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> DocumentFields:
        return parse_request(DocumentFields, body, limits)

    async def work(self, fields: DocumentFields, model: Model) -> Work:
        task = model.info.tasks[0]
        prompt = fields.prompt
        return Work(
            task,
            "prompt",
            texts=[prompt] if isinstance(prompt, str) else (),
            ids=[] if isinstance(prompt, str) else [prompt],
            dimensions=vector_width(fields.dimensions, model),
            truncate=fields.truncate_prompt_tokens,
            raw=fields.raw,
        )


class PairTask(PooledTask[PairFields]):
    """Pairs, by a model that scores them or by their vectors."""

    id_prefix = "offline-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> PairFields:
        return parse_request(PairFields, body, limits)

    async def work(self, fields: PairFields, model: Model) -> Work:
        return compare(fields.first, fields.second, model, fields, param="second")
