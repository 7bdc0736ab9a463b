"""`GET /`: the page that a browser shows at the server's address."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from catenary.v1.common_pb2 import MODEL_TASK_GENERATE as GENERATE
from catenary.version import __version__
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes
from gateway.text.models import ModelBoard, tasks_of

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


def routes(models: ModelBoard, *, can_serve: Callable[[], bool], keyed: bool) -> Routes:
    """The route; open without a key.

    Args:
        models: those that are served; not shown where clients need a key.
        can_serve: whether requests are served now.
        keyed: whether clients need a key.
    """
    router = Routes()

    @router.head("/", None)
    @router.get("/", operation("What is served, as a page for people", str, media_type=HTML))
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
    """The server's address as the client wrote it, without a path; a proxy may have taken TLS off."""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    return f"{scheme}://{request.url.netloc}"


def _command(address: str, models: ModelBoard, *, keyed: bool) -> str:
    """A request that the server answers, as a command for a shell; with keys, one that shows no model."""
    if keyed:
        # A key is not shown: the command reads it from a variable that its user sets.
        return f'API_KEY=...; curl {shlex.quote(address + "/v1/models")} -H "Authorization: Bearer $API_KEY"'
    chats = (name for name, model in models.names if GENERATE in tasks_of(model.info))
    if (name := next(chats, None)) is None:
        return f"curl {shlex.quote(address + '/v1/models')}"
    question = {"model": name, "messages": [{"role": "user", "content": "Name the capital of France."}]}
    url, body = shlex.quote(address + "/v1/chat/completions"), shlex.quote(json.dumps(question))
    return f"curl {url} -H 'Content-Type: application/json' -d {body}"


def _models_text(models: ModelBoard) -> str:
    names = ", ".join(f"<code>{escape(name)}</code>" for name, _ in models.names)
    return f"Models: {names}." if names else ""
