"""`GET /openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.version import __version__
from gateway.openapi.document import document
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes


def routes(routers: Sequence[Routes]) -> Routes:
    """The route; it needs a key like any other. `routers`: all others."""
    router = Routes()

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document([*routers, router], __version__))

    @router.head("/openapi.json", None)
    @router.get("/openapi.json", operation("This document", dict[str, Any]))
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    return router
