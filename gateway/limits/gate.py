"""The gate at which requests are counted against their key's limits."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from catenary.telemetry import new_id
from gateway.auth import owner_of
from gateway.errors import ApiError
from gateway.http.respond import send_error
from gateway.limits.allowance import COUNTED, Tried, allow
from gateway.limits.limiter import Limiter

LIMITED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/v1/classify",
        "/classify",
        "/v1/pooling",
        "/pooling",
        "/invocations",
    }
)
"""Routes on which engines compute something."""


class LimitGate:
    """ASGI middleware, behind the one that checks keys. Answers of limited routes tell of the limits."""

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in LIMITED:
            await self._app(scope, receive, send)
            return
        owner, request = owner_of(scope), new_id("at-")
        tried: Tried = scope.get(COUNTED) or Tried()
        try:
            allowance = await self._limiter.enter(owner, request, tried.allowance)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        allow(allowance)
        tried.allowance = allowance

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message.get("headers", ())}
                more = [header for header in allowance.headers if header[0] not in names]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            await self._limiter.leave(owner, request)
