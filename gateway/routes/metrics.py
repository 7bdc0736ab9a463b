"""`GET /metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gateway.metrics import GatewayMetrics


def routes(metrics: GatewayMetrics) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get("/metrics", summary="Prometheus metrics")
    async def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return router
