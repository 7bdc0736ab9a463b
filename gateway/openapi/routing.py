"""Routes: what answers a method of a path, with what it says about itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from gateway.openapi.operation import Operation

Handler = Callable[..., Awaitable[Response]]
"""Takes the request if it has a parameter of that name, and those of the path by theirs."""


class DescribedRoute(Route):
    """One method of one path."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        described: Operation | None,
        ids: Mapping[str, str],
    ) -> None:
        """Make one. `described` None: it is left out of the document. `ids`: see Routes."""
        super().__init__(path, _Endpoint(handler), methods=[method], name=handler.__name__)
        # Starlette's `$` also stands before a line break at the end: /v1/models%0A is not /v1/models.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        # Starlette lets HEAD follow GET.
        self.methods = {method}
        self.method = method
        self.described = described
        self._ids = ids

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Route. The route itself is in the scope then, for the metrics of requests."""
        match, more = super().matches(scope)
        return match, {**more, "route": self}

    def has_path(self, path: str) -> bool:
        """Whether this is a path of the route, whatever the method: one with a word where an id belongs, as
        /v1/responses/compact, is not, though the route would answer it as an id that does not exist."""
        found = self.path_regex.match(path)
        return found is not None and all(
            value.startswith(self._ids.get(name, "")) for name, value in found.groupdict().items()
        )


class Routes:
    """The routes of one file, in their order."""

    def __init__(self, ids: Mapping[str, str] | None = None) -> None:
        """`ids`: parameters of the paths that are ids of stored objects, each with how such ids begin."""
        self.all: list[DescribedRoute] = []
        self._ids = dict(ids or {})

    def get(self, path: str, described: Operation | None) -> Callable[[Handler], Handler]:
        """A decorator."""
        return self._add("GET", path, described)

    def head(self, path: str, described: Operation | None) -> Callable[[Handler], Handler]:
        """A decorator."""
        return self._add("HEAD", path, described)

    def post(self, path: str, described: Operation | None) -> Callable[[Handler], Handler]:
        """A decorator."""
        return self._add("POST", path, described)

    def delete(self, path: str, described: Operation | None) -> Callable[[Handler], Handler]:
        """A decorator."""
        return self._add("DELETE", path, described)

    def _add(self, method: str, path: str, described: Operation | None) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.all.append(DescribedRoute(method, path, handler, described, self._ids))
            return handler

        return add


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._takes_request = "request" in inspect.signature(handler).parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._takes_request:
            response = await self._handler(Request(scope, receive), **scope["path_params"])
        else:
            response = await self._handler(**scope["path_params"])
        await response(scope, receive, send)
