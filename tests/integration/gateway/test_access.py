"""Keys, hosts, origins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from catenary.v1 import common_pb2
from gateway.link.failover import FailoverSession
from tests.support.gateway import CHAT, COMPLETIONS, Stack
from tests.support.http import Connection, call, request_bytes
from tests.support.stack_fixtures import StartStack

KEY = "sk-one"
GOOD = {"Authorization": f"Bearer {KEY}"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")


@pytest.fixture
async def guarded(start_stack: StartStack, tmp_path: Path) -> Stack:
    """A gateway with keys from both sources."""
    file = tmp_path / "keys"
    file.write_text("sk-two\n# comment\nключ\n")
    return await start_stack(api_key=(KEY,), api_key_file=file, allowed_hosts=("*",))


async def routes(stack: Stack) -> list[str]:
    document = (await call(stack.address, "GET", "/openapi.json", headers=GOOD)).json()
    return [*document["paths"], "/openapi.json", "/docs", "/nope", "/"]


@pytest.mark.advisory("CVE-2026-59822")
async def test_every_route_and_method_needs_a_key(guarded: Stack) -> None:
    for path in await routes(guarded):
        for method in METHODS:
            answer = await call(guarded.address, method, path.replace("{model_id}", "x"))
            if path in ("/", "/live", "/health", "/ready", "/ping"):
                assert answer.status in (200, 405)
                continue
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "key", ["", "sk", "sk-one ", "sk-onee", "' OR 1=1--", "é", "\xff\xfe", "# comment", "x" * 8000]
)
@pytest.mark.advisory("CVE-2025-59425", "CVE-2026-42208")
async def test_wrong_keys(guarded: Stack, key: str) -> None:
    value = f"Bearer {key}"
    answer = await guarded.get("/v1/models", {"Authorization": value})
    assert answer.status == (200 if value.strip() == f"Bearer {KEY}" else 401)


async def test_right_keys(guarded: Stack) -> None:
    for key in (KEY, "sk-two", "ключ".encode().decode("latin-1")):
        headers = {"Authorization": f"Bearer {key}"}
        assert (await guarded.get("/v1/models", headers)).status == 200
    assert (await guarded.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, GOOD)).status == 200
    assert (await guarded.get("/metrics")).status == 401
    # No other header counts.
    assert (await guarded.get("/v1/models", {"X-Api-Key": KEY})).status == 401


@pytest.mark.advisory("CVE-2025-46570")
async def test_keys_share_no_cached_kv(guarded: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[str] = []
    submit = FailoverSession.submit

    def spy(session: FailoverSession, spec: common_pb2.SequenceSpec, *rest: Any) -> int:
        salts.append(spec.cache_salt)
        return submit(session, spec, *rest)

    monkeypatch.setattr(FailoverSession, "submit", spy)
    user = [{"role": "user", "content": "x"}]
    for key in (KEY, "sk-two"):
        headers = {"Authorization": f"Bearer {key}"}
        for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": user})):
            assert (await guarded.post(path, {**prompt, "max_tokens": 1, "n": 2}, headers)).status == 200
    one, two = set(salts[:4]), set(salts[4:])
    assert len(salts) == 8
    assert len(one) == len(two) == 1
    assert one != two
    assert not any(key in salt for key in (KEY, "sk-two") for salt in salts)
    salts.clear()
    for key in (KEY, KEY, "sk-two"):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": "mine/1"}
        assert (await guarded.post(COMPLETIONS, body, headers)).status == 200
    assert (salts[0] == salts[1], len({*salts, *one, *two})) == (True, 4)


@pytest.mark.advisory("CVE-2026-105752")
async def test_a_response_that_goes_on_keeps_the_salt_of_its_key(
    guarded: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts: list[str] = []
    submit = FailoverSession.submit

    def spy(session: FailoverSession, spec: common_pb2.SequenceSpec, *rest: Any) -> int:
        salts.append(spec.cache_salt)
        return submit(session, spec, *rest)

    monkeypatch.setattr(FailoverSession, "submit", spy)
    for key in (KEY, "sk-two"):
        headers, previous = {"Authorization": f"Bearer {key}"}, None
        for _ in range(3):
            body = {"input": "x", "max_output_tokens": 16, "previous_response_id": previous}
            answer = await guarded.post("/v1/responses", body, headers)
            assert answer.status == 200, answer.body
            previous = answer.json()["id"]
    assert (len(salts), len(set(salts[:3])), len(set(salts[3:])), len(set(salts))) == (6, 1, 1, 2)


async def test_without_keys_everybody_shares_cached_kv(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[common_pb2.SequenceSpec] = []
    submit = FailoverSession.submit

    def spy(session: FailoverSession, spec: common_pb2.SequenceSpec, *rest: Any) -> int:
        specs.append(spec)
        return submit(session, spec, *rest)

    monkeypatch.setattr(FailoverSession, "submit", spy)
    assert (await stack.complete("x", max_tokens=1)).status == 200
    assert [spec.cache_salt for spec in specs] == [""]


async def test_metrics_may_be_public(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=(KEY,), metrics_public=True)
    assert (await stack.get("/metrics")).status == 200
    assert (await stack.get("/metrics/")).status == 401


TRICKS = [
    ("GET /v1/models", "a/health?"),
    ("GET /v1/models", "a/"),
    ("GET /v1/models", "a#"),
    ("GET /v1/models", "a@b"),
    ("GET /v1/models", "a b"),
    ("GET /v1/models", "localhost\r\nHost: a"),
    ("GET //v1/models", "a"),
    ("GET /health/../v1/models", "a"),
    ("GET /v1/../v1/models", "a"),
    ("GET /V1/models", "a"),
    ("GET /%761/models", "a"),
    ("GET /live%2f..%2fv1/models", "a"),
    ("GET /v1/models?/live", "a"),
    ("GET /v1/models;/live", "a"),
    ("GET http://a/v1/models", "a"),
    ("GET http://live/v1/models", "a"),
    ("GET /live\x00", "a"),
    ("get /v1/models", "a"),
]


@pytest.mark.parametrize(("line", "host"), TRICKS)
@pytest.mark.advisory("CVE-2026-48746")
async def test_no_spelling_gets_past_the_key(guarded: Stack, line: str, host: str) -> None:
    connection = await Connection.to(guarded.address)
    await connection.send(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    status, _ = await asyncio.wait_for(connection.head(), 5)
    connection.close()
    assert status in (400, 401, 404)


@pytest.mark.advisory("CVE-2024-28224")
async def test_only_local_names_on_loopback_without_keys(stack: Stack) -> None:
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("app.localhost", 200),
        ("evil.test", 403),
        ("localhost.evil.test", 403),
    ):
        connection = await Connection.to(stack.address)
        await connection.send(request_bytes("GET", "/v1/models", host=host))
        assert (await connection.head())[0] == status, host
        connection.close()


async def test_allowed_hosts(start_stack: StartStack) -> None:
    stack = await start_stack(allowed_hosts=("api.test",))
    for host, status in (("API.test:80", 200), ("localhost", 403), ("other.test", 403)):
        for path, expected in (("/v1/models", status), ("/ready", 200)):
            connection = await Connection.to(stack.address)
            await connection.send(request_bytes("GET", path, host=host))
            assert (await connection.head())[0] == expected, (host, path)
            connection.close()


async def test_cross_origin_requests(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=(KEY,), cors_allow_origins=("https://good.test",))
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://good.test", **asks})
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://good.test"
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "content-type" in allowed
    answer = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://evil.test", **asks})
    assert "access-control-allow-origin" not in answer.headers
    answer = await stack.get("/v1/models", {"Origin": "https://good.test"})
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == "https://good.test"


async def test_no_origin_is_allowed_by_default(stack: Stack) -> None:
    answer = await stack.get("/v1/models", {"Origin": "http://evil.test"})
    assert "access-control-allow-origin" not in answer.headers
