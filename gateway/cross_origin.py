"""Requests from pages of other origins: which are allowed, and the headers for browsers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.answers import Fields, send_error
from gateway.limits.limiter import LIMIT_HEADERS
from gateway.schemas.ignored import IGNORED

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_EXPOSED = ", ".join(("x-request-id", "retry-after", "retry-after-ms", IGNORED, *LIMIT_HEADERS)).encode()


class CrossOrigin:
    def __init__(self, allowed: Sequence[str]) -> None:
        """Set the rules. `allowed`: origins whose pages may call; with "*": any; empty: none."""
        self._any = "*" in allowed
        self._allowed = frozenset(allowed)
        self._policy = CORSMiddleware(
            _nothing,
            allow_origins=allowed,
            allow_methods=_METHODS,
            allow_headers=["*"],
            # A page that may call from the Internet may call a server in its user's own network.
            allow_private_network=True,
        )

    def allows(self, origin: str) -> bool:
        """Return whether pages of `origin` may call."""
        return self._any or origin in self._allowed

    def fields(self, request: Headers) -> Fields:
        """Return the headers of any answer to a request with these headers."""
        if not self._allowed:
            return ()
        origin = request.get("origin")
        if origin is None or not self.allows(origin):
            return ((b"vary", b"Origin"),)
        shown = b"*" if self._any else origin.encode("latin-1")
        return (
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        )

    def gate(self, app: ASGIApp, *, keyed: bool) -> ASGIApp:
        """Put these rules in front of `app`: ASGI middleware that answers preflights, and refuses requests
        that a page may not make.

        A browser sends "simple" requests of any page without a preflight, and only hides the answers from the
        page. Where keys are needed (`keyed`) such a request has none and is refused for that: browsers do not
        add API keys by themselves, as they add cookies."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            asks_first = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            if self._allowed and asks_first and "origin" in headers:
                await self._policy.preflight_response(headers)(scope, receive, send)
            elif not keyed and self._is_foreign(scope["method"], headers):
                await send_error(
                    send,
                    ApiError(
                        403,
                        "This server takes no such request from a page of another origin; see its option "
                        "cors-allow-origins.",
                        kind="permission_error",
                        code="origin_not_allowed",
                    ),
                )
            else:
                await app(scope, receive, send)

        return gated

    def _is_foreign(self, method: str, headers: Headers) -> bool:
        """Return whether a request that changes state comes from a page that may not make it. Only browsers
        send either of the two headers."""
        if method in _SAFE_METHODS:
            return False
        origins = headers.getlist("origin")
        if len(origins) == 1 and self.allows(origins[0]):
            return False
        if sites := headers.getlist("sec-fetch-site"):
            return sites not in (["same-origin"], ["none"])
        host = headers.get("host", "").lower()
        return bool(origins) and [_authority(origin) for origin in origins] != [host]


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


async def _nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Stand for an application: the policy is asked, and never called as middleware."""
