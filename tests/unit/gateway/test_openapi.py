"""The OpenAPI document: complete, valid, and the same as what is read and written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.definitions import OPENAPI_31

from gateway import routing
from gateway.app import GatewayApp
from gateway.application import unknown_url
from gateway.config import GatewayConfig
from gateway.limits.limiter import LIMIT_HEADERS
from gateway.openapi import document
from gateway.routing import ASKS, Routes, batch_endpoints, limited_paths
from gateway.schemas.ignored import IGNORED
from gateway.streaming.answers import ChatChunk, ChunkChoice, Delta
from tests.support.secrets import TestSecrets

LIMITED = {
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
_HEALTH = {"/live", "/health", "/ready", "/ping"}


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> list[Routes]:
    """Those of a gateway that keeps everything."""
    secrets = TestSecrets.write(tmp_path_factory.mktemp("secrets"))
    directory = tmp_path_factory.mktemp("state")

    async def made() -> list[Routes]:
        # Its parts belong to a loop.
        return GatewayApp(config).routers

    links: dict[str, Any] = {"router": "unix:r.sock", "tokenizer": ("unix:t.sock",)}
    config = GatewayConfig(port=0, state_dir=Path(directory), client_secret_file=secrets.client_file, **links)
    return asyncio.run(made())


@pytest.fixture(scope="module")
def described(routers: list[Routes]) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(document(routers, "1")), type=dict[str, Any])


MEANT = [
    ("/v1/chat/completion", "/v1/chat/completions", False),
    ("/v1/Chat/Completions", "/v1/chat/completions", False),
    ("/v1/chat/completions/", "/v1/chat/completions", False),
    ("//v1/models", "/v1/models", False),
    ("/chat/completions", "/v1/chat/completions", True),
    ("/v1/v1/chat/completions", "/v1/chat/completions", True),
    ("/api/v1/chat/completions", "/v1/chat/completions", True),
    ("/v1/chat/completions/chat/completions", "/v1/chat/completions", True),
    ("/chat/completion", "/v1/chat/completions", False),
    ("/models", "/v1/models", True),
    ("/models/tiny", "/v1/models/{model_id}", True),
    ("/responses", "/v1/responses", True),
    ("/responses/resp_1", "/v1/responses/{response_id}", True),
    ("/embeddings", "/v1/embeddings", True),
    ("/v1/embedding", "/v1/embeddings", False),
    ("/v1/response", "/v1/responses", False),
    ("/v1/chat", "/v1/chat/completions", False),
    ("/completion", "/v1/completions", False),
    ("/metric", "/metrics", False),
    ("/openapi.jsn", "/openapi.json", False),
]


@pytest.mark.parametrize(("path", "meant", "base"), MEANT)
def test_an_unknown_url_is_told_with_the_one_that_is_meant(
    routers: list[Routes], path: str, meant: str, base: bool
) -> None:
    told = unknown_url(path, [route for routes in routers for route in routes.all])
    assert told.startswith(f"Unknown request URL. Did you mean {meant}?")
    assert told.endswith("this server's address followed by /v1.") is base


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/nope", "/api/generate", "/", "/favicon.ico", "/x" * 50, "/" + "x" * 9999]
)
def test_a_url_that_is_like_none_is_told_with_none(routers: list[Routes], path: str) -> None:
    assert unknown_url(path, [route for routes in routers for route in routes.all]) == "Unknown request URL."


def test_the_base_url_alone_is_told_what_it_is(routers: list[Routes]) -> None:
    told = unknown_url("/v1/", [route for routes in routers for route in routes.all])
    assert told.startswith("Unknown request URL. The base URL for clients of the OpenAI API is")


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_valid_openapi(described: dict[str, Any]) -> None:
    Draft202012Validator(OPENAPI_31).validate(described)
    for schema in described["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(ids) == len(set(ids))


def test_every_route_is_there(routers: list[Routes], described: dict[str, Any]) -> None:
    there = {(path, method) for path, method, _ in operations(described)}
    for router in routers:
        for route in router.all:
            if route.described:
                path = route.path.replace(":path", "")
                assert {(path, method.lower()) for method in route.methods or ()} <= there
            else:
                # A second method of a path.
                path = route.path.replace(":path", "")
                assert (path, "get") in there
                assert route.method == "HEAD" or path in _HEALTH


def test_every_operation_says_what_it_reads_and_writes(described: dict[str, Any]) -> None:
    error = {"$ref": "#/components/schemas/ErrorEnvelope"}
    for path, method, operation in operations(described):
        responses = operation["responses"]
        assert {"200", "400", "401", "500"} <= set(responses), path
        assert ("content" in responses["200"]) == (path != "/ping")
        for status, response in responses.items():
            if status != "200" and not (path in _HEALTH and status == "503"):
                assert response["content"]["application/json"]["schema"] == error
        if method == "post" and not path.endswith("/cancel"):
            (body,) = operation["requestBody"]["content"].values()
            assert body["schema"]
            assert {"413", "415", "429", "503"} <= set(responses), path
        names = {entry["name"] for entry in operation.get("parameters", ()) if entry["in"] == "path"}
        assert names == {part[1:-1] for part in path.split("/") if part.startswith("{")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/invocations"])
def test_streams_are_described(described: dict[str, Any], path: str) -> None:
    content = described["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


def test_headers_of_admission_and_limits_are_described(described: dict[str, Any]) -> None:
    asked = {"x-priority-class", "x-max-wait-ms", "x-session-id"}
    for path, method, operation in operations(described):
        names = {entry["name"] for entry in operation.get("parameters", ()) if entry["in"] == "header"}
        told = {status: set(found.get("headers", ())) for status, found in operation["responses"].items()}
        if path in LIMITED:
            assert (method, names) == ("post", asked)
            assert told["429"] == set(LIMIT_HEADERS)
            assert told["200"] == {*LIMIT_HEADERS, IGNORED}
        else:
            assert not names
            assert not any(told.values())


def test_what_engines_work_for_counts_against_the_limits_of_keys(routers: list[Routes]) -> None:
    assert set(limited_paths(routers)) == LIMITED
    assert batch_endpoints(routers) == (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling"),
    )


def test_a_route_that_asks_a_model_must_say_whether_it_is_limited() -> None:
    with pytest.raises(ValueError, match=r"Ask: .*limited="):
        routing.Operation("Ask", dict, fails=ASKS)


def test_references_lead_somewhere(described: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    found = set(references(described))
    assert found <= known


def test_schemas_are_called_by_plain_words(described: dict[str, Any]) -> None:
    # Of two types of one name, msgspec and pydantic would tell the modules.
    schemas = described["components"]["schemas"]
    names = {*schemas, *(schema["title"] for schema in schemas.values() if "title" in schema)}
    assert {name for name in names if not re.fullmatch("[A-Z][A-Za-z]+", name)} == set()
    assert {"Message", "ResponseMessage", "FunctionTool", "ResponseTool", "BatchPage", "ItemPage"} <= names


def test_required_is_what_is_always_written(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    chunk = ChatChunk("chatcmpl-1", "chat.completion.chunk", 1, "m", [ChunkChoice(0, Delta())])
    written = msgspec.json.decode(msgspec.json.encode(chunk))
    assert set(schemas["ChatChunk"]["required"]) == set(written)
    assert set(schemas["ChunkChoice"]["required"]) == set(written["choices"][0])
    assert schemas["Delta"]["required"] == []
    assert set(schemas["Usage"]["required"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert schemas["TextDelta"]["required"][0] == "type"
