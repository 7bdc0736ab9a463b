"""HTTP application of a gateway: its routes, and the layers that every request passes before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from catenary.nearest import nearest
from gateway.auth import AccessGate, ApiKeys, read_keys
from gateway.config import GatewayConfig
from gateway.cross_origin import CrossOrigin
from gateway.errors import ApiError, internal
from gateway.http.answers import error_response
from gateway.http.context import Observer, RequestContext
from gateway.routing import Access, DescribedRoute, DirectRoutes, Routes, paths_with
from gateway.schemas.ignored import IgnoredFieldsLayer

_VERSION = "/v1"
# Between two paths as short as these, a lower likeness is chance: /v1/messages and /v1/models have 0.64.
_LIKENESS = 0.8
_MOST_PARTS = 8


def routed(routers: Sequence[Routes], *, lenient: bool = False) -> ASGIApp:
    """Return the routes; exceptions become the API's errors.

    `lenient`: fields of requests that no route knows are ignored, and named in a header."""
    described = [route for router in routers for route in router.all]
    app = Starlette(
        routes=described,
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_defect},
    )
    app.router.redirect_slashes = False
    return IgnoredFieldsLayer(DirectRoutes(described, app), lenient=lenient)


def guarded(
    app: ASGIApp,
    routers: Sequence[Routes],
    config: GatewayConfig,
    observe: Observer,
    limit: Callable[[ASGIApp], ASGIApp],
    cross_origin: CrossOrigin,
) -> ASGIApp:
    """Put keys, limits, CORS, host names and request ids in front of `app`. Raises StartRefused for
    unreadable keys.

    Args:
        app: the routes.
        routers: the same, for their kinds of access.
        config: the gateway's options.
        observe: called for each request, see RequestContext.
        limit: puts the limits of keys in front of an application.
        cross_origin: the rules for pages of other origins.
    """
    keys = read_keys((*config.api_key, *config.operator_key), config.api_key_file)
    # Headers that it refuses are refused before a key's limits count the request.
    scraped = (Access.SCRAPE,) if config.metrics_public else ()
    open_paths = paths_with(routers, Access.PROBE, Access.OPEN, *scraped)
    behind: ASGIApp = AccessGate(limit(app), keys, ApiKeys(config.operator_key), open_paths=open_paths)
    behind = cross_origin.gate(behind, keyed=bool(keys))
    hosts = config.allowed_hosts or (None if _is_loopback(config.host) and not keys else ("*",))
    return RequestContext(
        behind,
        allowed_hosts=hosts,
        observe=observe,
        stall_s=config.stalled_client_s,
        answer_fields=cross_origin.fields,
        probed=paths_with(routers, Access.PROBE),
        unlogged=paths_with(routers, Access.PROBE, Access.SCRAPE),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _on_api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error_response(error)


async def _on_defect(_request: Request, _error: Exception) -> Response:
    """Answer a defect, which the framework raises again once this is sent; RequestContext logs it."""
    return error_response(internal())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer the refusals of the framework: unknown paths and wrong methods."""
    if not isinstance(error, HTTPException):
        raise error
    routes = [each for each in request.app.routes if isinstance(each, DescribedRoute)]
    path = request.scope["path"]
    methods = sorted({each.method for each in routes if each.has_path(path)})
    if error.status_code == 405 and methods:
        allowed = ", ".join(methods)
        return error_response(
            ApiError(
                405,
                f"This method is not allowed here. Allowed: {allowed}.",
                code="method_not_allowed",
                headers=(("allow", allowed),),
            )
        )
    return error_response(ApiError(404, unknown_url(path, routes), code="unknown_url"))


def unknown_url(path: str, routes: Sequence[DescribedRoute]) -> str:
    """Return the message for a path that no route has. It names the path that was probably meant, by a client
    whose base URL lacks /v1, has it twice or is a whole route, or by a typing error, and repeats no part of
    `path`."""
    text = "Unknown request URL."
    base = f"The base URL for clients of the OpenAI API is this server's address followed by {_VERSION}."
    parts = [part for part in path.casefold().split("/") if part.strip()]
    if parts == [_VERSION[1:]]:
        return f"{text} {base}"
    if len(parts) > _MOST_PARTS or not parts:
        return text
    given = "/" + "/".join(parts)
    for start in range(len(parts)):
        tail = "/" + "/".join(parts[start:])
        for tried in (tail, _VERSION + tail):
            meant = next((each.path_format for each in routes if each.has_path(tried)), None)
            if meant is not None:
                return f"{text} Did you mean {meant}?" + ("" if tried == given else f" {base}")
    whole = {each.path for each in routes if not each.param_convertors}
    for tried in (given, _VERSION + given):
        longer = (each for each in sorted(whole) if each.startswith(f"{tried}/"))
        meant = nearest(tried, whole, likeness=_LIKENESS) or next(longer, None)
        if meant is not None:
            return f"{text} Did you mean {meant}?"
    return text
