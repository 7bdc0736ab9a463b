"""HTTP itself: versions, framing, the Host header."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack
from tests.support.http import Answer, Connection, request_bytes

OLD = {"prompt": "x", "max_tokens": 5, "seed": 1}


def text_of(events: list[Any]) -> str:
    """The text of a stream, however its tokens were put together."""
    choices = [event["choices"][0] for event in events[:-1]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


async def old_answer(stack: Stack, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """The answer to an HTTP/1.0 request: all that comes until the server hangs up."""
    request = request_bytes(method, path, body, headers).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    connection = await stack.open_raw(request)
    raw = await asyncio.wait_for(connection.reader.read(), 10)
    connection.close()
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), rest)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_for_http_1_0_has_no_chunks(stack: Stack, path: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "seed": 1, "stream": True}
    body |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    answer = await old_answer(stack, "POST", path, body, Connection="keep-alive")
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & set(answer.headers)
    assert text_of(answer.events) == text_of((await stack.post(path, body)).events) != ""
    assert answer.events[-1] == "[DONE]"
    await stack.alive()


async def test_whole_answers_for_http_1_0(stack: Stack) -> None:
    answer = await old_answer(stack, "POST", COMPLETIONS, {"model": MODEL, **OLD}, Expect="100-continue")
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert len(answer.body) == int(answer.headers["content-length"])
    assert answer.json()["choices"][0]["text"] == (await stack.complete(**OLD)).json()["choices"][0]["text"]
    assert (await old_answer(stack, "HEAD", "/live")).status == 200
    assert (await old_answer(stack, "GET", "/nope")).status == 404


async def raw_status(stack: Stack, data: bytes) -> tuple[int, str]:
    connection = await Connection.to(stack.address)
    await connection.send(data)
    answer = await asyncio.wait_for(connection.answer(), 5)
    connection.close()
    return answer.status, answer.json().get("error", {}).get("code")


async def test_http_1_1_needs_a_host(stack: Stack) -> None:
    for path in ("/v1/models", "/live"):
        assert await raw_status(stack, f"GET {path} HTTP/1.1\r\n\r\n".encode()) == (400, "invalid_host")
        assert (await raw_status(stack, f"GET {path} HTTP/1.0\r\n\r\n".encode()))[0] == 200


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2", "3.0"])
async def test_other_versions_are_no_http(stack: Stack, version: str) -> None:
    request = f"GET /live HTTP/{version}\r\nHost: localhost\r\n\r\n".encode()
    assert await raw_status(stack, request) == (400, "invalid_http")


@pytest.mark.parametrize(
    "fields",
    [
        ["gzip, chunked"],
        ["gzip", "chunked"],
        ["chunked, chunked"],
        ["identity, chunked"],
        ["gzip,chunked"],
        ["gzip"],
        ["chunked, gzip"],
    ],
)
@pytest.mark.advisory("CVE-2025-43859")
async def test_only_the_chunked_transfer_encoding(stack: Stack, fields: list[str]) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "".join(f"Transfer-Encoding: {field}\r\n" for field in fields)
    answer = await raw_status(stack, head.encode() + b"\r\n2\r\n{}\r\n0\r\n\r\n")
    # The parser itself refuses those whose last word is not chunked.
    assert answer in {(400, "unsupported_transfer_encoding"), (400, "invalid_http")}
    await stack.alive()


@pytest.mark.parametrize("name", ["chunked", "Chunked", " chunked "])
async def test_chunked_bodies_are_read(stack: Stack, name: str) -> None:
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    fields = {"Content-Type": "application/json", "Transfer-Encoding": name}
    head = request_bytes("POST", COMPLETIONS, None, fields)
    connection = await stack.open_raw(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert (await asyncio.wait_for(connection.answer(), 5)).status == 200
    connection.close()
