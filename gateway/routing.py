"""Routes: handlers of methods and paths, with their descriptions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypedDict, TypeVar, Unpack

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.answers import Call, error_response
from gateway.http.request import ClientGone, Parameter
from gateway.schemas.base import RequestModel

JSON = "application/json"
ALWAYS = (400, 401, 403, 408, 431, 500)
"""Error statuses of every route: a bad head of the request, a key, a host name."""
STORED = (404, 503, 507)
"""Those of routes to stored objects."""
READS = (413, 415, 429, 503)
"""Those of routes that read a body."""
ASKS = (*READS, 404, 504)
"""Those of routes that ask a model."""


class Access(Enum):
    """Access to a route.

    KEY: clients with a key, if the gateway has keys. OPEN: all clients. PROBE: all clients, under any host
    name and without log lines: for routes that show only a state. SCRAPE: as KEY, or OPEN with the option
    metrics_public; no log line either."""

    KEY = auto()
    OPEN = auto()
    PROBE = auto()
    SCRAPE = auto()


class Told(TypedDict, total=False):
    """Fields of Operation that have a default."""

    further: tuple[type[RequestModel], Collection[str]]
    form: Any
    event: Any
    media_type: str
    query: Sequence[Parameter]
    fails: Iterable[int]
    also: Mapping[int, Any]
    limited: bool
    access: Access
    aliases: Sequence[str]


@dataclass(frozen=True, slots=True)
class Operation:
    """All that is to be said about a route: the document, the gates and batches go by it.

    Raises ValueError if a route asks a model and does not say whether it is limited.

    Fields:
        summary: one line.
        answer: the msgspec type of a 200, a tuple of types of which one is written, or None for an answer
            without a body.
        bodies: the models as one of which a JSON body is read.
        further: a model, and the names of those of its fields that a body has in addition to its own.
        form: the type of a multipart/form-data body instead.
        event: the type or types of an event's data, where the answer may be a stream.
        media_type: of the answers.
        query: parameters in the URL.
        fails: statuses of errors in addition to those of ALWAYS.
        also: types, as of `answer`, of further statuses that have no error envelope.
        limited: whether engines compute something for it, so that it counts against its key's limits.
        access: which clients may ask.
        aliases: further methods that answer alike, and are left out of the document.
    """

    summary: str
    answer: Any
    bodies: Sequence[type[RequestModel]] = ()
    further: tuple[type[RequestModel], Collection[str]] | None = None
    form: Any = None
    event: Any = None
    media_type: str = JSON
    query: Sequence[Parameter] = ()
    fails: Iterable[int] = ()
    also: Mapping[int, Any] = field(default_factory=dict)
    limited: bool | None = None
    access: Access = Access.KEY
    aliases: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.limited is None and set(ASKS) <= set(self.fails):
            raise ValueError(f"{self.summary}: say whether it counts against the limits of keys (limited=)")

    @property
    def answers(self) -> Mapping[int, Any]:
        """The types of all statuses without the error envelope."""
        return {200: self.answer, **self.also}


Handler = Callable[..., Awaitable[Response | None]]
"""Handler, which takes the parameters of the path by their names, and either `request`, to return the
response, or `call`, to write the answer itself."""


H = TypeVar("H", bound=Handler)


class DescribedRoute(Route):
    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        operation: Operation,
        ids: Mapping[str, str],
        described_method: str,
    ) -> None:
        """Make a route. `described_method`: the one that the document has of the path. `ids`: see Routes."""
        super().__init__(path, _Endpoint(handler), methods=[method], name=handler.__name__)
        # Starlette's `$` also stands before a line break at the end: /v1/models%0A is not /v1/models.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        # Starlette lets HEAD follow GET.
        self.methods = {method}
        self.method = method
        self.operation = operation
        self.described = method == described_method
        self._ids = ids

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match, and put the route into the scope for the metrics of requests."""
        match, more = super().matches(scope)
        return match, {**more, "route": self}

    def has_path(self, path: str) -> bool:
        """Return whether this is a path of the route, whatever the method. One with a word in place of an id,
        such as /v1/responses/compact, is not, though the route would answer it as an id that does not
        exist."""
        found = self.path_regex.match(path)
        return found is not None and all(
            value.startswith(self._ids.get(name, "")) for name, value in found.groupdict().items()
        )


Paths = str | Sequence[str]


class Routes:
    """The routes of one group, in their order, each declared by a decorator.

    It takes the path, or the paths that answer alike, and the fields of Operation."""

    def __init__(self, ids: Mapping[str, str] | None = None) -> None:
        """Make it empty. `ids`: parameters of the paths that are ids of stored objects, with their prefix."""
        self.all: list[DescribedRoute] = []
        self._ids = dict(ids or {})

    def get(self, paths: Paths, summary: str, answer: Any, **told: Unpack[Told]) -> Callable[[H], H]:
        return self._add("GET", paths, Operation(summary, answer, **told))

    def post(
        self, paths: Paths, summary: str, answer: Any, *bodies: type[RequestModel], **told: Unpack[Told]
    ) -> Callable[[H], H]:
        return self._add("POST", paths, Operation(summary, answer, bodies, **told))

    def delete(self, paths: Paths, summary: str, answer: Any, **told: Unpack[Told]) -> Callable[[H], H]:
        return self._add("DELETE", paths, Operation(summary, answer, **told))

    def _add(self, method: str, paths: Paths, described: Operation) -> Callable[[H], H]:
        def add(handler: H) -> H:
            for path in (paths,) if isinstance(paths, str) else paths:
                for each in (method, *described.aliases):
                    self.all.append(DescribedRoute(each, path, handler, described, self._ids, method))
            return handler

        return add


def limited_paths(routers: Iterable[Routes]) -> tuple[str, ...]:
    """Return the paths of the routes whose requests count against the limits of keys, in their order."""
    routes = (route for router in routers for route in router.all)
    return tuple(route.path for route in routes if route.described and route.operation.limited)


def paths_with(routers: Iterable[Routes], *access: Access) -> frozenset[str]:
    """Return the paths of the routes with one of these kinds of access."""
    return frozenset(
        route.path for router in routers for route in router.all if route.operation.access in access
    )


def batch_endpoints(routers: Iterable[Routes]) -> tuple[str, ...]:
    """Return the paths that a batch may be for: those below `/v1/` that engines work for."""
    return tuple(path for path in limited_paths(routers) if path.startswith("/v1/"))


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        parameters = inspect.signature(handler).parameters
        self._takes_call = "call" in parameters
        self._takes_request = "request" in parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = scope["path_params"]
        if self._takes_call:
            # If the client is gone, the framework would answer the exception with a 500.
            with suppress(ClientGone):
                await self._handler(Call(scope, receive, send), **given)
            return
        if self._takes_request:
            given = {**given, "request": Request(scope, receive)}
        response = await self._handler(**given)
        if response is not None:
            await response(scope, receive, send)


class DirectRoutes:
    """ASGI application that finds most requests' route by method and path, and passes the others to `app`.

    The framework's way to a route passes some twenty functions that these routes do not need."""

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
