"""`GET /`: the page that a browser shows at the server's address."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from starlette.responses import HTMLResponse, Response

from catenary.version import __version__
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes
from gateway.text.models import ModelBoard

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
<p>Clients of the OpenAI API take <code>/v1</code> of this address as their base URL{key}. In a terminal:</p>
<pre>catenary chat --base-url <i>this address</i></pre>
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
    async def home() -> Response:
        page = _PAGE.format(
            version=escape(__version__),
            state="It is ready." if can_serve() else "It is not ready: no engine serves a model yet.",
            models="" if keyed else _models_text(models),
            key=" and an API key" if keyed else "; no API key is needed",
        )
        return HTMLResponse(page, headers=_HEADERS)

    return router


def _models_text(models: ModelBoard) -> str:
    names = ", ".join(f"<code>{escape(name)}</code>" for name, _ in models.names)
    return f"Models: {names}." if names else ""
