"""The HTTP application of a gateway: its routes, and what every request passes before them."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.auth import ApiKeys, AuthGate, CallerGate, read_keys
from gateway.batches import BATCH_ID, FILE_ID
from gateway.config import GatewayConfig
from gateway.cross_origin import CrossOrigin
from gateway.errors import ApiError, internal
from gateway.http import Observer, RequestContext, error_response
from gateway.ignored import IgnoredFieldsLayer
from gateway.limits import Limiter, LimitGate
from gateway.openapi import DescribedRoute, DirectRoutes, Routes
from gateway.responses import ID_PREFIX as RESPONSE_ID

_ID_PREFIXES = {"response_id": RESPONSE_ID, "file_id": FILE_ID, "batch_id": BATCH_ID}
"""How the ids begin that stand in paths."""


def routed(routers: Sequence[Routes], *, lenient: bool = False) -> ASGIApp:
    """The routes; what they raise becomes the API's errors.

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
    config: GatewayConfig,
    observe: Observer,
    limiter: Limiter | None,
    cross_origin: CrossOrigin,
) -> ASGIApp:
    """`app` behind keys, limits, CORS, host names and request ids. Raises StartRefused for keys that cannot
    be read.

    Args:
        app: the routes.
        config: the gateway's options.
        observe: is told of each request, as RequestContext says.
        limiter: of keys; None: there are no limits.
        cross_origin: the rules for pages of other origins.
    """
    keys = read_keys((*config.api_key, *config.operator_key), config.api_key_file)
    behind = app if limiter is None else LimitGate(app, limiter)
    # Headers that it refuses are refused before a key's limits count the request.
    behind = CallerGate(behind, ApiKeys(config.operator_key))
    behind = AuthGate(behind, keys, metrics_public=config.metrics_public)
    behind = cross_origin.gate(behind, keyed=bool(keys))
    hosts = config.allowed_hosts or (None if _is_loopback(config.host) and not keys else ("*",))
    return RequestContext(
        behind,
        allowed_hosts=hosts,
        observe=observe,
        stall_s=config.stalled_client_s,
        answer_fields=cross_origin.fields,
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
    """The framework raises the defect again when this is sent; RequestContext logs it."""
    return error_response(internal())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and wrong methods."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405 and not _names_no_object(request):
        return error_response(
            ApiError(
                405,
                "This method is not allowed here.",
                code="method_not_allowed",
                headers=(("allow", ", ".join(_methods_of(request))),),
            )
        )
    return error_response(ApiError(404, "Unknown request URL.", code="unknown_url"))


def _names_no_object(request: Request) -> bool:
    """Whether a path that looks like that of a stored object has a word in its place, as a path of a route
    that is not there does: /v1/responses/compact."""
    return any(
        not request.path_params[name].startswith(prefix)
        for name, prefix in _ID_PREFIXES.items()
        if name in request.path_params
    )


def _methods_of(request: Request) -> list[str]:
    path, routes = request.scope["path"], request.app.routes
    return sorted(
        {each.method for each in routes if isinstance(each, DescribedRoute) and each.path_regex.match(path)}
    )
