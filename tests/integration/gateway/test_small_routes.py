"""Routes that tell of the server: HEAD, trailing slashes, formats of metrics, paths that are none."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_metrics

from tests.support.gateway import MODEL, Stack
from tests.support.http import call
from tests.support.stack_fixtures import StartStack

READ = ["/", "/live", "/health", "/ready", "/ping", "/metrics", "/version", "/openapi.json", "/v1/models"]


@pytest.mark.parametrize("path", [*READ, f"/v1/models/{MODEL}", "/v1/models/"])
async def test_head_answers_like_get_without_a_body(stack: Stack, path: str) -> None:
    head, get = await call(stack.address, "HEAD", path), await stack.get(path)
    assert head.status == get.status == 200
    assert head.body == b""
    assert head.headers.get("content-type") == get.headers.get("content-type")
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]
    # The connection is good for another request: there was no body.
    assert (await call(stack.address, "HEAD", "/v1/models/none")).status == 404


async def test_models_with_a_slash_behind_are_the_models(stack: Stack) -> None:
    assert (await stack.get("/v1/models/")).body == (await stack.get("/v1/models")).body
    card = await stack.get(f"/v1/models/{MODEL}")
    assert (await stack.get(f"/v1/models/{MODEL}/")).body == card.body
    assert (await stack.get(f"/v1/models/{MODEL}//")).status == 404


ACCEPTED = {
    "": "text/plain; version=0.0.4; charset=utf-8",
    "*/*": "text/plain; version=0.0.4; charset=utf-8",
    "text/plain": "text/plain; version=0.0.4; charset=utf-8",
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1": "text/plain; version=0.0.4; charset=utf-8",
    "text/plain;version=1.0.0": "text/plain; version=1.0.0; charset=utf-8; escaping=underscores",
    "application/openmetrics-text": "application/openmetrics-text; version=1.0.0; charset=utf-8",
    "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3": (
        "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
    ),
    "application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4": (
        "text/plain; version=0.0.4; charset=utf-8"
    ),
    "nonsense;;;,": "text/plain; version=0.0.4; charset=utf-8",
}


@pytest.mark.parametrize("accept", ACCEPTED)
async def test_metrics_come_in_the_format_that_is_asked_for(stack: Stack, accept: str) -> None:
    await stack.complete(max_tokens=1)
    answer = await stack.get("/metrics", {"Accept": accept} if accept else None)
    assert (answer.status, answer.headers["content-type"]) == (200, ACCEPTED[accept])
    text = answer.body.decode()
    read = open_metrics if "openmetrics" in ACCEPTED[accept] else plain_metrics
    names = {sample.name for family in read(text) for sample in family.samples}
    assert {"catenary_gateway_live_sequences", "catenary_request_success_total"} <= names


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/compact/cancel", 404),
        ("GET", "/v1/responses/resp_1/cancel", 405),
        ("POST", "/v1/files/search", 404),
        ("POST", "/v1/files/file-1", 405),
        ("DELETE", "/v1/batches/all", 404),
        ("DELETE", "/v1/batches/batch_1", 405),
        ("POST", "/v1/models/tiny", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completion", 404),
        ("GET", "/v1/models%0A", 404),
        ("GET", "/v1/models/%0A", 404),
        ("GET", "/v1/batches%0A", 404),
    ],
)
async def test_a_path_that_is_no_route_is_404(stack: Stack, method: str, path: str, status: int) -> None:
    answer = await call(stack.address, method, path)
    assert answer.status == status
    assert ("allow" in answer.headers) == (status == 405)
    if path == "/v1/models":
        assert answer.headers["allow"] == "GET, HEAD"
    if method != "HEAD":
        code = "unknown_url" if status == 404 else "method_not_allowed"
        assert answer.json()["error"]["code"] == code


async def test_the_address_itself_is_a_page_that_says_what_this_is(stack: Stack) -> None:
    page = await stack.get("/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = page.body.decode()
    assert "It is ready." in text
    assert f"<code>{MODEL}</code>" in text
    assert "no API key is needed" in text
    for path in ("/v1/models", "/openapi.json", "/metrics", "/v1/chat/completions"):
        assert path in text


def command_of(page: str) -> list[str]:
    """The words of the command that the page shows, as a shell reads them."""
    found = re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert found is not None
    return shlex.split(unescape(found.group(1)))


async def test_the_command_of_the_page_is_a_request_that_the_server_answers(stack: Stack) -> None:
    page = (await stack.get("/", {"Host": "127.0.0.1:8000"})).body.decode()
    program, url, _, header, _, body = command_of(page)
    assert (program, header) == ("curl", "Content-Type: application/json")
    assert url == "http://127.0.0.1:8000/v1/chat/completions"
    assert "<code>http://127.0.0.1:8000/v1</code>" in page
    answer = await stack.post("/v1/chat/completions", json.loads(body) | {"max_tokens": 1})
    assert answer.status == 200


@pytest.mark.parametrize("host", ["localhost:9000", "10.0.0.7", "[::1]:8000"])
async def test_the_page_shows_the_address_that_its_client_wrote(stack: Stack, host: str) -> None:
    page = (await stack.get("/", {"Host": host})).body.decode()
    assert f"<code>http://{host}/v1</code>" in page
    assert command_of(page)[1] == f"http://{host}/v1/chat/completions"


async def test_the_page_knows_that_a_proxy_took_tls_off(stack: Stack) -> None:
    page = (await stack.get("/", {"Host": "localhost", "X-Forwarded-Proto": "https"})).body.decode()
    assert command_of(page)[1] == "https://localhost/v1/chat/completions"


async def test_the_page_of_a_gateway_with_keys_names_no_model(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=("k-one",))
    page = await stack.get("/", {"Host": "localhost"})
    assert page.status == 200
    assert MODEL not in page.body.decode()
    assert "and an API key" in page.body.decode()
    words = ["API_KEY=...;", "curl", "http://localhost/v1/models", "-H", "Authorization: Bearer $API_KEY"]
    assert command_of(page.body.decode()) == words
    assert (await stack.get("/v1/models")).status == 401
