"""The short way to a route whose path has no parts to be read."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.respond import error_response
from gateway.openapi.routing import DescribedRoute


class DirectRoutes:
    """ASGI application: finds by method and path what most requests are for, and leaves the others to `app`.

    The framework's way to a route passes some twenty functions, none of which has anything to do for these.
    """

    def __init__(self, routes: Sequence[DescribedRoute], app: ASGIApp) -> None:
        self._app = app
        self._routes: dict[tuple[str, str], DescribedRoute] = {}
        with_parts: list[DescribedRoute] = []
        for route in routes:
            if route.param_convertors:
                with_parts.append(route)
            elif not any(earlier.path_regex.match(route.path) for earlier in with_parts):
                self._routes.setdefault((route.method, route.path), route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["path_params"] = route, {}
        try:
            await route.app(scope, receive, send)
        except ApiError as error:
            # Anything else is a defect: RequestContext logs and answers it.
            await error_response(error)(scope, receive, send)
            # The same error may be raised again, with a traceback that grows.
            error.__traceback__ = None
