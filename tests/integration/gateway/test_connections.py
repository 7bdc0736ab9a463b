"""What a connection may look like: heads, bodies, chunks, how many."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack
from tests.support.http import Connection, request_bytes
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually


async def refusal(connection: Connection, timeout_s: float = 5) -> tuple[int, str]:
    """Status and code of an answer from below the routes, after which the connection ends."""
    answer = await asyncio.wait_for(connection.answer(), timeout_s)
    connection.close()
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req-")
    return answer.status, error["code"]


@pytest.mark.advisory("CVE-2025-48956")
async def test_a_head_over_the_limit(stack: Stack) -> None:
    connection = await Connection.to(stack.address)
    data = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: " + b"a" * (10 << 20)
    sending = asyncio.ensure_future(connection.send(data))
    assert await refusal(connection) == (431, "headers_too_large")
    sending.cancel()
    connection = await Connection.to(stack.address)
    await connection.send(request_bytes("GET", "/live", headers={f"X-{i}": "1" for i in range(200)}))
    assert await refusal(connection) == (431, "headers_too_large")
    connection = await Connection.to(stack.address)
    await connection.send(b"GET /" + b"a" * 100_000)
    assert await refusal(connection) == (431, "headers_too_large")
    await stack.alive()


async def test_the_limit_of_a_head_is_not_one_of_its_body(start_stack: StartStack) -> None:
    stack = await start_stack(max_header_kib=1)
    body = {"model": MODEL, "prompt": [7] * 1000, "max_tokens": 1}
    connection = await Connection.to(stack.address)
    for _ in range(2):
        await connection.send(request_bytes("POST", COMPLETIONS, body, {"X-A": "a" * 800}))
        assert (await connection.answer()).status == 200
    connection.close()


@pytest.mark.advisory("CVE-2025-48956")
async def test_a_head_that_dribbles_in(start_stack: StartStack) -> None:
    stack = await start_stack(header_timeout_s=0.3)
    for data in (b"", b"GET /live HTTP/1.1\r\n"):
        connection = await Connection.to(stack.address)
        await connection.send(data)
        assert await refusal(connection) == (408, "timeout")
    assert (await stack.get("/live")).status == 200


async def test_a_body_that_dribbles_in(start_stack: StartStack) -> None:
    stack = await start_stack(body_timeout_s=0.3)
    connection = await Connection.to(stack.address)
    await connection.send(request_bytes("POST", CHAT, b"{", {"Content-Length": "100"}))
    answer = await asyncio.wait_for(connection.answer(), 5)
    assert (answer.status, answer.json()["error"]["code"]) == (408, "timeout")
    connection.close()
    await stack.alive()


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
NO_HTTP = [
    b"\x00\x01\x02\x03" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /live HTTP/9.9\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"GET /live HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
]


@pytest.mark.parametrize("data", NO_HTTP)
async def test_what_is_no_http_is_400(stack: Stack, data: bytes) -> None:
    connection = await Connection.to(stack.address)
    await connection.send(data)
    assert await refusal(connection) == (400, "invalid_http")
    await stack.alive()


async def test_a_refused_head_keeps_the_id_of_its_own_request(stack: Stack) -> None:
    connection = await Connection.to(stack.address)
    await connection.send(request_bytes("GET", "/live", headers={"X-Request-Id": "first"}))
    assert (await connection.answer()).headers["x-request-id"] == "first"
    await connection.send(
        b"GET /live HTTP/1.1\r\nX-Request-Id: second\r\nHost: localhost\r\nBad Header: x\r\n\r\n"
    )
    answer = await connection.answer()
    assert (answer.status, answer.headers["x-request-id"]) == (400, "second")
    connection.close()
    connection = await Connection.to(stack.address)
    await connection.send(request_bytes("GET", "/live", headers={"X-Request-Id": "first"}))
    await connection.answer()
    await connection.send(b"\x00")
    assert await refusal(connection) == (400, "invalid_http")


@pytest.mark.advisory("CVE-2025-23310")
async def test_many_tiny_chunks(stack: Stack) -> None:
    body = request_bytes(
        "POST", COMPLETIONS, None, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    )
    text = b'{"model": "tiny", "max_tokens": 1, "prompt": "' + b"x" * 20_000 + b'"}'
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in text) + b"0\r\n\r\n"
    connection = await Connection.to(stack.address)
    await connection.send(body + chunks)
    answer = await asyncio.wait_for(connection.answer(), 10)
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    connection.close()


async def test_connections_are_kept_alive(stack: Stack) -> None:
    connection = await Connection.to(stack.address)
    one = request_bytes("POST", COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 1})
    for _ in range(3):
        await connection.send(one)
        assert (await asyncio.wait_for(connection.answer(), 10)).status == 200
    connection.close()


async def test_pipelined_requests_are_left_to_be_sent_again(stack: Stack) -> None:
    one = request_bytes("POST", COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 1})
    flood = request_bytes("GET", "/live") * 100_000
    connection = await stack.open_raw(one + flood)
    answer = await asyncio.wait_for(connection.answer(), 10)
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert await asyncio.wait_for(closed(connection), 5)
    connection.close()
    await stack.alive()


async def closed(connection: Connection) -> bool:
    """Whether the server ends the connection without another byte."""
    try:
        return await connection.reader.read() == b""
    except ConnectionError:
        return True


CHUNKED = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}


@pytest.mark.parametrize("start", [b"0\r\nX-T: ", b"0\r\n", b"1;", b"1\r\nx\r\n0\r\nX-T: "])
@pytest.mark.parametrize("path", [COMPLETIONS, "/nope"])
@pytest.mark.advisory("CVE-2025-23310")
async def test_endless_trailers_and_chunk_extensions(stack: Stack, path: str, start: bytes) -> None:
    connection = await stack.open_raw(request_bytes("POST", path, None, CHUNKED) + start)
    sent = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            while sent < 20 << 20:
                await connection.send(b"a" * 65536)
                sent += 65536
    assert sent < 20 << 20
    connection.close()
    await stack.alive()


async def test_too_many_connections(start_stack: StartStack) -> None:
    stack = await start_stack(max_connections=5)
    held = [await Connection.to(stack.address) for _ in range(5)]
    await asyncio.sleep(0)
    for _ in range(3):
        extra = await stack.open_raw(request_bytes("GET", "/live"))
        answer = await asyncio.wait_for(extra.answer(), 5)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert "limit of 5 connections" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        assert await closed(extra)
        extra.close()
    for connection in held:
        connection.close()
    server = stack.gateway.server
    await eventually(lambda: not server.connections, "room for connections")
    await stack.alive()


LARGE = b'{"model": "tiny", "prompt": "' + b"x" * (9 << 20) + b'"}'


@pytest.mark.parametrize("fields", [{}, {"Connection": "close"}])
@pytest.mark.parametrize("path", [COMPLETIONS, "/nope", "/v1/files"])
async def test_an_early_refusal_reaches_a_client_that_sends_on(
    stack: Stack, path: str, fields: dict[str, str]
) -> None:
    """It sends all before it reads, as many clients do."""
    connection = await stack.open_raw(request_bytes("POST", path, LARGE, fields))
    answer = await asyncio.wait_for(connection.answer(), 10)
    assert answer.status == {COMPLETIONS: 413, "/nope": 404, "/v1/files": 415}[path]
    connection.close()
    await stack.alive()


async def test_an_early_refusal_reaches_http_1_0(stack: Stack) -> None:
    """As nginx speaks to its upstream by default."""
    request = request_bytes("POST", COMPLETIONS, LARGE).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    connection = await stack.open_raw(request)
    answer = await asyncio.wait_for(connection.answer(), 10)
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert await closed(connection)
    connection.close()


async def test_lingering_has_its_limits(start_stack: StartStack) -> None:
    stack = await start_stack(linger_s=0.2, max_discarded_mib=1)
    server = stack.gateway.server
    head = request_bytes("POST", "/nope", None, {"Content-Length": str(1 << 30), "Connection": "close"})
    silent = await stack.open_raw(head)
    assert (await asyncio.wait_for(silent.answer(), 5)).status == 404
    await eventually(lambda: not server.connections, "a connection that is closed after its time")
    endless = await stack.open_raw(head)
    async with asyncio.timeout(10):
        with suppress(ConnectionError):
            while True:
                await endless.send(b"a" * 65536)
    for connection in (silent, endless):
        connection.close()


async def test_a_client_that_stops_sending_gets_its_answer(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "seed": 1}
    for fields in ({}, {"stream": True}):
        connection = await stack.open_raw(request_bytes("POST", COMPLETIONS, {**body, **fields}))
        connection.writer.write_eof()
        status = 100
        while status == 100:
            status, headers = await asyncio.wait_for(connection.head(), 10)
        assert (status, headers["connection"]) == (200, "close")
        rest = await asyncio.wait_for(connection.reader.read(), 10)
        assert rest.endswith(b"0\r\n\r\n") if fields else int(headers["content-length"]) == len(rest)
        connection.close()
    old = await stack.open_raw(request_bytes("GET", "/live").replace(b"HTTP/1.1", b"HTTP/1.0"))
    old.writer.write_eof()
    assert (await asyncio.wait_for(old.reader.read(), 10)).startswith(b"HTTP/1.1 200")
    old.close()
    await stack.alive()


async def test_a_client_that_stops_sending_within_a_request_gets_none(stack: Stack) -> None:
    whole = request_bytes("POST", COMPLETIONS, {"model": MODEL, "prompt": "x"})
    for size in (0, 10, len(whole) - 5):
        connection = await stack.open_raw(whole[:size])
        connection.writer.write_eof()
        assert await asyncio.wait_for(closed(connection), 5)
        connection.close()


@pytest.mark.parametrize("offer", ["h2c", "websocket", "foo"])
async def test_an_offer_to_upgrade_is_declined_with_its_body_read(stack: Stack, offer: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 1}
    request = request_bytes("POST", COMPLETIONS, body, {"Connection": "Upgrade", "Upgrade": offer})
    connection = await stack.open_raw(request[:-5])
    await connection.send(request[-5:])
    assert (await asyncio.wait_for(connection.answer(), 10)).status == 200
    await connection.send(request)
    assert (await asyncio.wait_for(connection.answer(), 10)).status == 200
    connection.close()


async def test_a_byte_order_mark_before_json_is_skipped(stack: Stack) -> None:
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    for mark, status in ((b"\xef\xbb\xbf", 200), (b"\xef\xbb\xbf" * 2, 400), (b"\xff\xfe", 400)):
        connection = await stack.open_raw(request_bytes("POST", COMPLETIONS, mark + body))
        assert (await asyncio.wait_for(connection.answer(), 10)).status == status, mark
        connection.close()


async def test_a_client_that_was_not_told_to_send_its_body_is_closed(stack: Stack) -> None:
    """Its next bytes could be the body or another request."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    head, _, data = request_bytes("POST", "/nope", body, {"Expect": "100-continue"}).partition(b"\r\n\r\n")
    refused = await stack.open_raw(head + b"\r\n\r\n")
    answer = await asyncio.wait_for(refused.answer(), 5)
    assert (answer.status, answer.headers["connection"]) == (404, "close")
    await refused.send(request_bytes("GET", "/live"))
    assert await closed(refused)
    refused.close()
    taken = await stack.open_raw(head.replace(b"/nope", COMPLETIONS.encode()) + b"\r\n\r\n")
    assert (await asyncio.wait_for(taken.head(), 5))[0] == 100
    await taken.send(data)
    answer = await asyncio.wait_for(taken.answer(), 5)
    assert answer.status == 200
    assert "connection" not in answer.headers
    taken.close()
