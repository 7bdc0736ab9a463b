"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from starlette.responses import Response

from catenary.v1 import tokenizer_pb2
from gateway.errors import ErrorEnvelope
from gateway.generation.endpoint import Endpoint
from gateway.generation.planning import truncation
from gateway.generation.service import GenerationService
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.schemas.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.validation import parse_request
from gateway.streaming.completion import Completion, CompletionWriter
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool
from gateway.text.rendered import Rendered


class CompletionEndpoint(Endpoint[CompletionRequest]):
    """Plain prompts, as text or as ids."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS
    scores_stop_token = True
    writer = CompletionWriter

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> CompletionRequest:
        return parse_request(CompletionRequest, body, limits)

    async def render(
        self, fields: CompletionRequest, model: Model, pool: TokenizerPool, request_id: str
    ) -> Rendered:
        texts = [prompt for prompt in fields.prompt if isinstance(prompt, str)]
        if not texts:
            return Rendered.of_ids([prompt for prompt in fields.prompt if isinstance(prompt, list)])
        keep = truncation(fields, model.max_model_len)
        return await pool.render(
            tokenizer_pb2.RenderRequest(
                request_id=request_id,
                model=model.name,
                completion=tokenizer_pb2.CompletionInput(
                    prompts=texts, add_special_tokens=fields.add_special_tokens
                ),
                max_prompt_tokens=model.max_model_len if keep is None else None,
                truncate_to=keep,
            )
        )


def routes(service: GenerationService) -> Routes:
    """The route."""
    router = Routes()
    serve = partial(service.serve, CompletionEndpoint())

    @router.post(
        "/v1/completions",
        operation(
            "Go on with a text",
            Completion,
            CompletionRequest,
            event=(Completion, ErrorEnvelope),
            fails=ASKS,
        ),
    )
    async def completions() -> Response:
        return Deferred(serve)

    return router
