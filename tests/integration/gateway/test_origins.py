"""Pages of other origins: what they may do, and what their browsers are told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack
from tests.support.http import Answer, Connection, call, request_bytes
from tests.support.stack_fixtures import StartStack

GOOD = "https://good.test"
EVIL = "http://evil.test"
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n'
)


async def upload(stack: Stack, **fields: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return await call(stack.address, "POST", "/v1/files", UPLOAD, {**FORM, **named})


FOREIGN: list[dict[str, str]] = [
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://localhost.evil.test"},
    {"Origin": "http://[bad"},
    {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "made-up"},
]
OWN: list[dict[str, str]] = [
    {},
    {"Origin": "http://localhost"},
    {"Origin": "https://LOCALHOST"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"},
    # A proxy in front of the server may change the Host header.
    {"Origin": "https://public.test", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]


@pytest.mark.parametrize("fields", FOREIGN)
@pytest.mark.advisory("CVE-2024-28224")
async def test_a_foreign_page_changes_nothing(stack: Stack, fields: dict[str, str]) -> None:
    for path, body, kind in (
        ("/v1/files", UPLOAD, FORM),
        (COMPLETIONS, b"{}", {"Content-Type": "text/plain"}),
        (CHAT, b"{}", {}),
        ("/v1/responses/resp_1/cancel", b"", {}),
        ("/v1/batches/batch_1/cancel", b"", {}),
        ("/tokenize", b"{}", {}),
        ("/invocations", b"{}", {}),
        ("/nope", b"", {}),
    ):
        answer = await call(stack.address, "POST", path, body, {**kind, **fields})
        assert (answer.status, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "access-control-allow-origin" not in answer.headers
    assert (await call(stack.address, "DELETE", "/v1/files/file-1", None, fields)).status == 403
    assert (await stack.get("/v1/models", fields)).status == 200
    assert (await stack.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize("fields", OWN)
async def test_own_pages_and_other_programs_pass(stack: Stack, fields: dict[str, str]) -> None:
    answer = await upload(stack, **fields)
    assert answer.status == 200
    path = f"/v1/files/{answer.json()['id']}"
    assert (await call(stack.address, "DELETE", path, None, fields)).status == 200


async def test_pages_of_allowed_origins_pass(start_stack: StartStack) -> None:
    stack = await start_stack(cors_allow_origins=(GOOD,))
    answer = await upload(stack, Origin=GOOD, Sec_Fetch_Site="cross-site")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == GOOD
    assert (await upload(stack, Origin=EVIL)).status == 403


async def test_pages_of_any_origin_pass_where_all_are_allowed(start_stack: StartStack) -> None:
    stack = await start_stack(cors_allow_origins=("*",))
    answer = await upload(stack, Origin=EVIL, Sec_Fetch_Site="cross-site")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


async def test_where_keys_are_needed_a_key_is_enough(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=("sk-one",))
    assert (await upload(stack, Origin=EVIL)).status == 401
    assert (await upload(stack, Origin=EVIL, Authorization="Bearer sk-one")).status == 200


ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def test_a_page_may_call_a_server_of_its_users_network(start_stack: StartStack) -> None:
    stack = await start_stack(cors_allow_origins=(GOOD,))
    fields = {"Origin": GOOD, **ASKS, "Access-Control-Request-Private-Network": "true"}
    answer = await call(stack.address, "OPTIONS", CHAT, headers=fields)
    assert answer.status == 200
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-allow-origin"] == GOOD
    refused = await call(stack.address, "OPTIONS", CHAT, headers={**fields, "Origin": EVIL})
    assert refused.status == 400
    assert "access-control-allow-origin" not in refused.headers


async def raw(stack: Stack, data: bytes) -> tuple[Answer, list[str]]:
    """An answer, and the names of all its headers."""
    connection = await Connection.to(stack.address)
    await connection.send(data)
    head = (await connection.reader.readuntil(b"\r\n\r\n")).decode()
    connection.close()
    first, *lines = head.strip().split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    fields = {name.lower(): value for name, value in pairs}
    return Answer(int(first.split()[1]), fields, b""), [name.lower() for name, _ in pairs]


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "too many fields": (431, {"headers": {f"X-{number}": "1" for number in range(200)}}),
    "no such host": (403, {"host": "other.test"}),
    "unknown path": (404, {"path": "/nope"}),
    "no key": (200, {}),
    "bad coding": (400, {"headers": {"Transfer-Encoding": "gzip, chunked"}}),
    "wrong type": (415, {"method": "POST", "path": COMPLETIONS}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_every_answer_can_be_read_by_an_allowed_page(start_stack: StartStack, name: str) -> None:
    stack = await start_stack(cors_allow_origins=(GOOD,))
    status, given = REFUSED[name]
    fields = {"Origin": GOOD, **given.get("headers", {})}
    request = request_bytes(
        given.get("method", "GET"),
        given.get("path", "/v1/models"),
        headers=fields,
        host=given.get("host", "localhost"),
    )
    answer, names = await raw(stack, request)
    assert answer.status == status
    assert answer.headers["access-control-allow-origin"] == GOOD
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "retry-after-ms", "x-ratelimit-reset-tokens"} <= set(exposed)
    assert "origin" in answer.headers["vary"].lower()
    assert names.count("access-control-allow-origin") == 1
    other, _ = await raw(stack, request.replace(GOOD.encode(), b"https://evil.test"))
    assert "access-control-allow-origin" not in other.headers


async def test_streams_of_allowed_pages_can_be_read(start_stack: StartStack) -> None:
    stack = await start_stack(cors_allow_origins=(GOOD,))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
    answer = await call(stack.address, "POST", COMPLETIONS, body, {"Origin": GOOD})
    assert answer.events[-1] == "[DONE]"
    assert answer.headers["access-control-allow-origin"] == GOOD
