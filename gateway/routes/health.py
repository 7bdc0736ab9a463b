"""`/live`, `/health` and `/ready`: open without a key, small, and never waiting for anything."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from gateway.http.answers import Status, json_response
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes

_NOT_NOW = {503: Status}


def routes(*, can_serve: Callable[[], bool], draining: Callable[[], bool]) -> Routes:
    """The routes.

    Args:
        can_serve: whether there is a session to the router, an engine that serves a model, and a tokenizer.
        draining: whether the gateway is about to stop; /ready then says so, and load balancers turn away.
    """
    router = Routes()

    @router.head("/live", None)
    @router.get("/live", operation("The process is alive", Status))
    async def live() -> Response:
        return _status("ok")

    @router.head("/health", None)
    @router.get("/health", operation("An engine serves a model", Status, also=_NOT_NOW))
    async def health() -> Response:
        return _status("ok" if can_serve() else "unavailable")

    @router.head("/ready", None)
    @router.get("/ready", operation("New requests are taken", Status, also=_NOT_NOW))
    async def ready() -> Response:
        if draining():
            return _status("draining")
        return _status("ok" if can_serve() else "unavailable")

    return router


def _status(status: str) -> Response:
    return json_response(Status(status), 200 if status == "ok" else 503)
