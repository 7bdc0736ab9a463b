"""Routes about the server: health, the page at its address, metrics, models, the OpenAPI document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from catenary.v1 import router_pb2
from catenary.v1.common_pb2 import MODEL_TASK_GENERATE as GENERATE
from catenary.version import __version__
from gateway.http.answers import Status, json_response
from gateway.metrics import GatewayMetrics
from gateway.openapi import document
from gateway.routing import Access, Routes
from gateway.text.models import ModelRegistry, task_names, tasks_of

_NOT_NOW = {503: Status}


def health_routes(*, can_serve: Callable[[], bool], draining: Callable[[], bool]) -> Routes:
    """Return the routes.

    Args:
        can_serve: whether there is a session to the router, an engine that serves a model, and a tokenizer.
        draining: whether the gateway is about to stop; /ready then reports that, and load balancers send no
            more.
    """
    router = Routes()

    @router.get("/live", "The process is alive", Status, aliases=("HEAD",), access=Access.PROBE)
    async def live() -> Response:
        return _status("ok")

    @router.get(
        "/health", "An engine serves a model", Status, also=_NOT_NOW, aliases=("HEAD",), access=Access.PROBE
    )
    async def health() -> Response:
        return _status("ok" if can_serve() else "unavailable")

    @router.get(
        "/ready", "New requests are taken", Status, also=_NOT_NOW, aliases=("HEAD",), access=Access.PROBE
    )
    async def ready() -> Response:
        if draining():
            return _status("draining")
        return _status("ok" if can_serve() else "unavailable")

    return router


def _status(status: str) -> Response:
    return json_response(Status(status), 200 if status == "ok" else 503)


HTML = "text/html; charset=utf-8"
# Nothing but the page itself: no script, no picture, no other site may show it in a frame.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
_PAGE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Catenary</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}}
code,pre{{font-family:ui-monospace,monospace;background:#8881}} pre{{padding:.7rem;overflow:auto}}
td{{padding:.15rem 1rem .15rem 0;vertical-align:top}}</style>
<h1>Catenary {version}</h1>
<p>An OpenAI-compatible server for language models. {state}</p>
<p>{models}</p>
<p>Clients of the OpenAI API take <code>{address}/v1</code> as their base URL{key}. In a terminal:</p>
<pre>{command}</pre>
<table>
<tr><td><code>/v1/chat/completions</code>, <code>/v1/responses</code>, <code>/v1/completions</code>
<td>generate text
<tr><td><code>/v1/embeddings</code>, <code>/v1/rerank</code>, <code>/v1/score</code>, <code>/classify</code>
<td>vectors, scores and classes of texts
<tr><td><a href="v1/models"><code>/v1/models</code></a><td>the models that are served
<tr><td><a href="openapi.json"><code>/openapi.json</code></a><td>every route, with what it takes and answers
<tr><td><a href="metrics"><code>/metrics</code></a><td>for Prometheus
<tr><td><a href="ready"><code>/ready</code></a>, <a href="live"><code>/live</code></a><td>for load balancers
</table>
</html>
"""


def home_routes(models: ModelRegistry, *, can_serve: Callable[[], bool], keyed: bool) -> Routes:
    """Return the route, which is open without a key.

    Args:
        models: those that are served; not shown where clients need a key.
        can_serve: whether requests are served now.
        keyed: whether clients need a key.
    """
    router = Routes()

    @router.get(
        "/",
        "What is served, as a page for people",
        str,
        media_type=HTML,
        aliases=("HEAD",),
        access=Access.OPEN,
    )
    async def home(request: Request) -> Response:
        address = _address(request)
        page = _PAGE.format(
            address=escape(address),
            command=escape(_command(address, models, keyed=keyed)),
            version=escape(__version__),
            state="It is ready." if can_serve() else "It is not ready: no engine serves a model yet.",
            models="" if keyed else _models_text(models),
            key=" and an API key" if keyed else "; no API key is needed",
        )
        return HTMLResponse(page, headers=_HEADERS)

    return router


def _address(request: Request) -> str:
    """Return the server's address as the client wrote it, without a path; a proxy may have terminated TLS."""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    return f"{scheme}://{request.url.netloc}"


def _command(address: str, models: ModelRegistry, *, keyed: bool) -> str:
    """Return a request that the server answers, as a shell command; with keys, one that shows no model."""
    if keyed:
        # A key is not shown: the command reads it from a variable that its user sets.
        return f'API_KEY=...; curl {shlex.quote(address + "/v1/models")} -H "Authorization: Bearer $API_KEY"'
    chats = (name for name, model in models.names if GENERATE in tasks_of(model.info))
    if (name := next(chats, None)) is None:
        return f"curl {shlex.quote(address + '/v1/models')}"
    question = {"model": name, "messages": [{"role": "user", "content": "Name the capital of France."}]}
    url, body = shlex.quote(address + "/v1/chat/completions"), shlex.quote(json.dumps(question))
    return f"curl {url} -H 'Content-Type: application/json' -d {body}"


def _models_text(models: ModelRegistry) -> str:
    names = ", ".join(f"<code>{escape(name)}</code>" for name, _ in models.names)
    return f"Models: {names}." if names else ""


def metrics_routes(metrics: GatewayMetrics) -> Routes:
    router = Routes()

    @router.get(
        "/metrics",
        "Prometheus metrics",
        str,
        media_type=CONTENT_TYPE_PLAIN_0_0_4,
        aliases=("HEAD",),
        access=Access.SCRAPE,
    )
    async def page(request: Request) -> Response:
        content, media_type = metrics.page(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    return router


OWNER = "catenary"


class ModelCard(msgspec.Struct):
    """A served model. `max_model_len`: tokens of a prompt with its answer; `tasks`: what it does."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    tasks: list[str]


class ModelList(msgspec.Struct):
    """All models that can be asked."""

    data: list[ModelCard]
    object: str = "list"


def describe(name: str, model: router_pb2.ServedModel) -> ModelCard:
    """Return a model as the API shows it under one of its names; its `root` is the model's own."""
    info = model.info
    return ModelCard(
        name, "model", model.created, OWNER, info.name, None, info.max_model_len, task_names(info)
    )


def model_routes(models: ModelRegistry) -> Routes:
    """Return the routes. Ids may contain slashes."""
    router = Routes()

    @router.get("/v1/models", "List the served models", ModelList, aliases=("HEAD",))
    async def list_models() -> Response:
        return json_response(ModelList([describe(*named) for named in models.names]))

    @router.get(
        "/v1/models/{model_id:path}",
        "Describe a served model",
        ModelCard,
        fails=(404, 503),
        aliases=("HEAD",),
    )
    async def get_model(model_id: str) -> Response:
        if not model_id:
            # Clients join the base URL and the path in their own ways.
            return await list_models()
        if model_id.endswith("/") and model_id not in {name for name, _ in models.names}:
            model_id = model_id[:-1]
        return json_response(describe(model_id, models.listed(model_id)))

    return router


def openapi_routes(routers: Sequence[Routes]) -> Routes:
    """Return the route; it needs a key like any other. `routers`: all others."""
    router = Routes()

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document([*routers, router], __version__))

    @router.get("/openapi.json", "This document", dict[str, Any], aliases=("HEAD",))
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    return router
