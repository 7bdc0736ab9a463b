"""`GET /metrics`."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gateway.metrics import GatewayMetrics
from gateway.openapi import Routes, operation


def routes(metrics: GatewayMetrics) -> Routes:
    """The route."""
    router = Routes()

    @router.get("/metrics", operation("Prometheus metrics", str, media_type=CONTENT_TYPE_LATEST))
    async def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return router
