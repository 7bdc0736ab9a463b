"""A hostile client: requests and bytes that attack a server, each as its own clients would never send it."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from typing import Any

from benchmarks.soaking.clients import CHAT, COMPLETIONS, PATIENCE_S, RESPONSES, Counts
from tests.support.http import Connection, request_bytes

# What a refusal, or an answer to what was meant harmless after all, may be.
_SOUND = (200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 421, 422, 426, 431, 501, 505)


def _fields(rng: random.Random) -> list[dict[str, Any]]:
    number = rng.randrange(10**6)
    return [
        {"n": 10**9},
        {"best_of": 10**6},
        {"max_tokens": 10**12},
        {"min_tokens": 10**12},
        {"stop_token_ids": [2**63]},
        {"allowed_token_ids": [-1]},
        {"logit_bias": {"-1": 1}},
        {"bad_words": ["x" * 1000]},
        {"prompt": [-1]},
        {"prompt": ["a"] * 5000},
        {"prompt": "x" * 300_000},
        {"prompt_embeds": "AAAA"},
        {"kv_transfer_params": {"tp_size": 10**9}},
        {"cache_salt": "a" * 10_000},
        {"chat_template": "{% for i in range(10**10) %}x{% endfor %}"},
        {"api_base": "http://127.0.0.1/"},
        {f"unknown{number}": number},
        {"model": f"no-such-model-{number}"},
        {"guided_regex": "["},
        {"guided_regex": f"(a{number}+)+b"},
        {"guided_regex": "a{1,1000}{1,1000}"},
        {"guided_grammar": "root ::= root"},
        {"guided_grammar": "root ::= " + "(" * 30_000 + '"a"'},
        {"guided_json": {"type": "strsing", "title": str(number)}},
        {"guided_json": {"enum": [f"value {number} {one}" for one in range(20_000)]}},
        {"guided_json": "[" * 5000},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]},
    ]


def _raw(rng: random.Random) -> list[bytes]:
    number = rng.randrange(10**6)
    ask = json.dumps({"model": "m", "prompt": "x"}).encode()
    chunked = {"Transfer-Encoding": "chunked"}
    bomb = gzip.compress(b" " * 2_000_000)
    return [
        rng.randbytes(rng.randrange(1, 2000)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300),
        request_bytes("POST", CHAT, b"[" * 100_000),
        request_bytes("POST", CHAT, b'{"model": "m", "messages": [' + b"{}," * 50_000 + b"{}]}"),
        request_bytes("POST", COMPLETIONS, b'{"model": "m", "prompt": "x", "temperature": NaN}'),
        request_bytes("POST", COMPLETIONS, b"\xff\xfe"),
        request_bytes("POST", RESPONSES, b'{"input": "\\ud800"}'),
        request_bytes("POST", COMPLETIONS, bomb, {"Content-Encoding": "gzip"}),
        request_bytes("POST", COMPLETIONS, None, {"Content-Length": str(10**15)}),
        request_bytes("POST", COMPLETIONS, None, {"Content-Length": "-1"}),
        request_bytes("POST", COMPLETIONS, ask, chunked),
        request_bytes("POST", COMPLETIONS, None, chunked) + b"zz\r\n",
        request_bytes("POST", COMPLETIONS, None, chunked) + b"1\r\n \r\n" * 5000 + b"0\r\n\r\n",
        request_bytes("GET", "/v1/models", None, {"X-Forwarded-For": "1" * 1_000_000}),
        request_bytes("GET", "/v1/models", None, {f"X-{one}": "1" for one in range(2000)}),
        request_bytes("GET", "/v1/models", None, {"X-Request-Id": "a" * 10_000}),
        request_bytes("GET", "/v1/models", host="a/health?"),
        request_bytes("GET", f"/v1/../{number}/%00"),
        request_bytes("GET", "/" + "a" * 100_000),
        request_bytes("BREW", f"/coffee/{number}"),
        request_bytes("DELETE", f"/v1/responses/resp_{number}"),
        request_bytes("GET", f"/v1/files/../../etc/passwd{number}"),
    ]


async def hostile(counts: Counts, address: str, model: str, rng: random.Random) -> None:
    """One attack. No answer at all is sound where the bytes are no HTTP; a status of 500 never is."""
    if rng.random() < 0.5:
        data = rng.choice(_raw(rng))
    else:
        fields = rng.choice(_fields(rng))
        chat = "tools" in fields or "chat_template" in fields
        asked = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        body = {"model": model, "max_tokens": 4, **asked, **fields}
        data = request_bytes("POST", CHAT if chat else COMPLETIONS, body)
    connection = await Connection.to(address)
    try:
        async with asyncio.timeout(PATIENCE_S):
            try:
                await connection.send(data)
                connection.writer.write_eof()
                # The server finds out with interim answers whether a client that sends no more still reads.
                while (answer := await connection.answer()).status == 100:
                    pass
            except (OSError, EOFError):
                return counts.add("hostile", "hung up")
        return counts.expect("hostile", answer.status, _SOUND, answer.body)
    finally:
        connection.close()
