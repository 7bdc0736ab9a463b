"""`/live`, `/health` and `/ready`: open without a key, small, and never waiting for anything."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import JSONResponse


def routes(*, can_serve: Callable[[], bool], draining: Callable[[], bool]) -> APIRouter:
    """The routes.

    Args:
        can_serve: whether there is a session to the router, an engine that serves a model, and a tokenizer.
        draining: whether the gateway takes nothing new; /ready then says so, and load balancers turn away.
    """
    router = APIRouter()

    @router.head("/live", include_in_schema=False)
    @router.get("/live", summary="The process is alive")
    async def live() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="An engine serves a model")
    async def health() -> JSONResponse:
        return _status("ok" if can_serve() else "unavailable")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="New requests are taken")
    async def ready() -> JSONResponse:
        if draining():
            return _status("draining")
        return _status("ok" if can_serve() else "unavailable")

    return router


def _status(status: str) -> JSONResponse:
    return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)
