"""`POST /v1/score` and `/score`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.pooling.answers import Score, ScoreList, usage_of
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import compare, scores_of
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import ScoreRequest
from gateway.schemas.validation import parse_request
from gateway.text.models import Model


class ScoreEndpoint(PooledEndpoint[ScoreRequest]):
    """Scores of pairs, in their order."""

    id_prefix = "score-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> ScoreRequest:
        return parse_request(ScoreRequest, body, limits)

    async def work(self, fields: ScoreRequest, model: Model) -> Work:
        first, second = fields.sides
        return compare(first, second, model, fields, param=fields.names[1])

    def write(self, fields: ScoreRequest, pooled: Pooled) -> bytes:
        scores = scores_of(pooled)
        answer = ScoreList(
            pooled.request_id,
            "list",
            pooled.created,
            pooled.model.asked,
            [Score(index, "score", score) for index, score in enumerate(scores)],
            usage_of(pooled.prompt_tokens),
        )
        return msgspec.json.encode(answer)


def routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, ScoreEndpoint())
    described = operation("Score how well texts belong together", ScoreList, ScoreRequest, fails=ASKS)

    @router.post("/score", described)
    @router.post("/v1/score", described)
    async def score() -> Response:
        return Deferred(serve)

    return router
