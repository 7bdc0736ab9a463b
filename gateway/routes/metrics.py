"""`GET /metrics`."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from gateway.metrics import GatewayMetrics
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes


def routes(metrics: GatewayMetrics) -> Routes:
    """The route."""
    router = Routes()

    @router.head("/metrics", None)
    @router.get("/metrics", operation("Prometheus metrics", str, media_type=CONTENT_TYPE_PLAIN_0_0_4))
    async def page(request: Request) -> Response:
        content, media_type = metrics.page(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    return router
