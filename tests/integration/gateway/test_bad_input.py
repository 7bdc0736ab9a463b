"""Nothing that a client can send is a 500, a hang, or felt by a neighbour."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway import GatewayConfig
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, script
from tests.support.http import Connection, call, request_bytes
from tests.support.neighbour import neighbour
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import VOCAB_SIZE

USER = [{"role": "user", "content": "hi"}]
LEAKS = ("/home/", "/root/", "site-packages", 'File "', "Traceback", "0x7f", ".py")


def raw(text: str) -> bytes:
    """A chat whose body ends with this."""
    return f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], {text}}}'.encode()


RAW_BODIES: list[tuple[str, bytes, str | None]] = [
    ("empty", b"", None),
    ("cut short", b"{", None),
    ("array", b"[]", None),
    ("string", b'"x"', None),
    ("null", b"null", None),
    ("number", b"1", None),
    ("trailing", b"{} x", None),
    ("byte order mark", b"\xef\xbb\xbf\xef\xbb\xbf{}", None),
    ("bad utf-8", b"\xff\xfe", None),
    ("bad utf-8 inside", raw('"user": "\xff"').decode().encode("latin-1"), None),
    ("encoded surrogate", b'{"model": "\xed\xa0\x80"}', None),
    ("lone surrogate", b'{"model": "\\ud800"}', None),
    ("NaN", raw('"temperature": NaN'), None),
    ("Infinity", raw('"temperature": Infinity'), None),
    ("-Infinity", raw('"top_p": -Infinity'), None),
    ("1e400", raw('"temperature": 1e400'), None),
    ("-1e400", raw('"frequency_penalty": -1e400'), None),
    ("NaN penalty", raw('"presence_penalty": NaN'), None),
    ("NaN min_p", raw('"min_p": NaN'), None),
    ("NaN bias", raw('"logit_bias": {"5": NaN}'), None),
    ("Infinity bias", raw('"logit_bias": {"5": Infinity}'), None),
    ("NaN length penalty", raw('"use_beam_search": true, "length_penalty": NaN'), None),
    ("deep arrays", b"[" * 100_000, None),
    ("deep in a field", raw('"metadata": ' + "[" * 50_000 + "]" * 50_000), None),
    ("deep objects", raw('"tools": ' + '{"a":' * 5000 + "1" + "}" * 5000), None),
    ("huge integer", raw('"seed": ' + "9" * 5000), None),
    ("big integer", raw('"max_tokens": 18446744073709551616'), "max_tokens"),
]

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": 5}, "messages"),
    ({"messages": [123]}, "messages.0"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 5000}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"stop": [5]}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids"),
    ({"min_tokens": 10**12}, "min_tokens"),
    ({"min_tokens": 1023}, "min_tokens"),
    ({"best_of": 10**6}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(key): 1 for key in range(2000)}}, "logit_bias"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE + 10]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [0] * 20_000}, "allowed_token_ids"),
    ({"bad_words": ["x" * 1000]}, "bad_words"),
    ({"bad_words": ["x"] * 1000}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"priority": -(2**31)}, "priority"),
    ({"use_beam_search": True, "length_penalty": 1000}, "length_penalty"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"response_format": {"type": "sound"}}, "response_format.type"),
    ({"kv_transfer_params": {"tp_size": 10**9}}, "kv_transfer_params"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"cache_salt": "a" * 129}, "cache_salt"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"api_base": "http://127.0.0.1/"}, "api_base"),
]

FLOODS = [
    b'{"model": "tiny", "messages": [' + b"{}," * 1_000_000 + b"{}]}",
    raw('"metadata": {' + ",".join(f'"{key}": 1' for key in range(200_000)) + "}"),
    b"{" + b",".join(b'"%d":1' % key for key in range(200_000)) + b"}",
]

PROMPTS: list[Any] = [
    "",
    [],
    [[]],
    [""],
    [-1],
    [[-1]],
    [VOCAB_SIZE],
    [2**31],
    [2**63],
    [True],
    [1.0],
    ["a"] * 5000,
    [5] * 1024,
    [[5] * 1025],
    "x" * 5_000_000,
    "x " * 2000,
]


@pytest.mark.parametrize(
    ("body", "param"), [(b, p) for _, b, p in RAW_BODIES], ids=[name for name, _, _ in RAW_BODIES]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.advisory("CVE-2026-22778", "CVE-2026-54235", "CVE-2024-27454")
async def test_bodies_that_are_no_request(
    shared_stack: Stack, path: str, body: bytes, param: str | None
) -> None:
    answer = await shared_stack.post(path, body)
    error = answer.json()["error"]
    assert answer.status == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not any(leak in answer.body.decode() for leak in LEAKS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[str(fields)[:40] for fields, _ in FIELDS])
@pytest.mark.advisory(
    "CVE-2024-6587",
    "CVE-2025-62372",
    "CVE-2024-8939",
    "GHSA-4xqp-c3mv-qff7",
    "CVE-2026-21869",
    "CVE-2026-93436",
)
async def test_bad_fields_are_400_before_any_event(
    shared_stack: Stack, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = await shared_stack.post(CHAT, {"messages": USER, "stream": stream, **fields})
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"].split(".")[0] == param.split(".")[0]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda value: str(value)[:20])
@pytest.mark.advisory("CVE-2024-8768", "CVE-2026-73559", "CVE-2026-93592")
async def test_bad_prompts_are_400(shared_stack: Stack, prompt: Any) -> None:
    answer = await shared_stack.complete(prompt, max_tokens=1)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] in ("prompt", "prompt.0")


async def test_the_context_error_has_both_numbers(shared_stack: Stack) -> None:
    answer = await shared_stack.complete([5] * 1000, max_tokens=25)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert "1024" in error["message"]
    assert "1025" in error["message"]
    assert (await shared_stack.complete([5] * 1000, max_tokens=24)).status == 200
    assert (await shared_stack.complete([5] * 1023)).json()["usage"]["completion_tokens"] == 1
    long_text = await shared_stack.complete("xyzzy " * 1000)
    assert long_text.json()["error"]["code"] == "context_length_exceeded"
    assert "1024" in long_text.json()["error"]["message"]


async def test_a_prompt_that_fills_a_long_context(start_stack: StartStack) -> None:
    # A slow machine reads such a prompt for minutes: the defaults must leave it the time.
    assert GatewayConfig.model_fields["request_timeout_s"].default >= 600
    stack = await start_stack(script(model={"max_model_len": 8192}))
    answer = await stack.complete([7] * 8191, max_tokens=1)
    assert (answer.status, answer.json()["usage"]["total_tokens"]) == (200, 8192)
    assert (await stack.complete([7] * 8191, max_tokens=2)).status == 400


@pytest.mark.parametrize("name", ["nope", "../../etc/x", "a;id", "a\x00b", "x" * 10_000, "http://127.0.0.1/"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.advisory("CVE-2025-23319")
async def test_unknown_models_are_404(shared_stack: Stack, name: str, stream: bool) -> None:
    for path, fields in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
        answer = await shared_stack.post(path, {"model": name, "stream": stream, **fields})
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert len(error["message"]) < 200


async def test_wrong_paths_and_methods(shared_stack: Stack) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nope", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", COMPLETIONS, 405, "method_not_allowed"),
        ("GET", "/v1/models/../models/x", 404, "model_not_found"),
        ("GET", "//v1/models", 404, "unknown_url"),
        ("GET", "/V1/models", 404, "unknown_url"),
    ):
        answer = await call(shared_stack.address, method, path)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code), path
        assert (status == 405) == ("allow" in answer.headers)


@pytest.mark.advisory("CVE-2024-12886")
async def test_wrong_content_types(shared_stack: Stack) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "", "multipart/form-data; boundary=x"):
        answer = await shared_stack.post(CHAT, b"{}", {"Content-Type": kind})
        assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_content_type")
    answer = await shared_stack.post(CHAT, b"\x1f\x8b\x08", {"Content-Encoding": "gzip"})
    assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    good = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 1}).encode()
    assert (
        await shared_stack.post(CHAT, good, {"Content-Type": "Application/JSON; charset=utf-8"})
    ).status == 200


@pytest.mark.advisory("CVE-2025-23310")
async def test_a_body_over_the_limit_is_refused_unread(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_mib=0.01)
    answer = await stack.complete("x" * 20_000)
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "0.01 MiB" in answer.json()["error"]["message"]
    connection = await Connection.to(stack.address)
    head = request_bytes("POST", CHAT, b"", {"Content-Length": str(200 << 20)})
    await connection.send(head)
    status, _ = await asyncio.wait_for(connection.head(), 1)
    assert status == 413
    connection.close()
    connection = await Connection.to(stack.address)
    head = request_bytes(
        "POST", CHAT, None, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    )
    await connection.send(head + b"1\r\nx\r\n" * 15_000)
    assert (await asyncio.wait_for(connection.head(), 5))[0] == 413
    connection.close()
    await stack.alive()


async def test_a_neighbour_feels_nothing(start_stack: StartStack, say: Callable[[str], None]) -> None:
    stack = await start_stack(script(step_delay_ms=2))
    async with neighbour(stack, say):
        for _ in range(2):
            jobs = [stack.post(CHAT, body) for _, body, _ in RAW_BODIES]
            jobs += [stack.post(CHAT, {"messages": USER, **fields}) for fields, _ in FIELDS]
            jobs += [stack.complete(prompt, max_tokens=1) for prompt in PROMPTS]
            jobs += [stack.post(CHAT, flood) for flood in FLOODS]
            answers = [await job for job in jobs]
            assert {answer.status for answer in answers} == {400}
    await stack.alive()


async def test_ten_thousand_short_messages_are_refused_fast(shared_stack: Stack) -> None:
    started = time.process_time()
    answer = await shared_stack.post(CHAT, {"messages": USER * 10_000})
    assert answer.status == 400
    assert time.process_time() - started < 2
    await shared_stack.alive()


@pytest.mark.advisory("CVE-2026-105755")
async def test_request_ids(shared_stack: Stack) -> None:
    assert (await shared_stack.get("/live", {"X-Request-Id": "my-id_1.2"})).headers[
        "x-request-id"
    ] == "my-id_1.2"
    for bad in ("x" * 129, "a b", "é", ""):
        echoed = (await shared_stack.get("/live", {"X-Request-Id": bad})).headers["x-request-id"]
        assert echoed.startswith("req-")
    same = {"X-Request-Id": "same"}
    body = {"prompt": "x", "max_tokens": 5, "seed": 1}
    answers = await asyncio.gather(
        shared_stack.post(COMPLETIONS, body, same),
        shared_stack.post(COMPLETIONS, {**body, "prompt": "y"}, same),
    )
    assert [answer.status for answer in answers] == [200, 200]
    assert len({answer.json()["id"] for answer in answers}) == 2


@pytest.mark.advisory("CVE-2026-105759")
async def test_made_up_names_add_no_metrics(stack: Stack) -> None:
    await stack.complete("x", max_tokens=1)
    for number in range(3):
        await _oddities(stack, number)
    await stack.get("/metrics")
    before = (await stack.get("/metrics")).body.count(b"\n")
    for number in range(50):
        await _oddities(stack, number)
    assert (await stack.get("/metrics")).body.count(b"\n") == before


async def _oddities(stack: Stack, number: int) -> None:
    await stack.complete("x", model=f"model-{number}")
    await stack.get(f"/path-{number}")
    await stack.get(f"/v1/models/model-{number}")
    await call(stack.address, "PROPFIND", "/live")
