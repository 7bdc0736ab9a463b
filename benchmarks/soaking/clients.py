"""The clients of a soak: normal, slow, cancelling and hostile ones, and a neighbour that must not suffer."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.http import Connection, request_bytes

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# A client gives up an answer after so long: that is counted, and no answer of a healthy server.
PATIENCE_S = 120.0
# An overloaded server says so; that is no fault.
_BUSY = (429, 503)

_WORDS = "river stone lantern quiet harbour copper window seven market thunder paper orchard".split()  # noqa: SIM905

Client = Callable[["Counts", str, str, random.Random], Awaitable[None]]
"""One turn of a client: counts, base URL, model, and where its choices come from."""


class Counts:
    """Results of the requests, by the kind of client; `unexpected` has the faults, each shown once."""

    def __init__(self) -> None:
        self.answers: dict[str, Counter[str]] = {}
        self.unexpected: Counter[str] = Counter()

    def add(self, kind: str, outcome: str) -> None:
        """One request more."""
        self.answers.setdefault(kind, Counter())[outcome] += 1

    def fault(self, kind: str, outcome: str, detail: str) -> None:
        """One request more that a sound server would have answered otherwise."""
        self.add(kind, outcome)
        line = f"{kind}: {outcome}: {detail[:200]}"
        self.unexpected[line] += 1
        if self.unexpected[line] == 1:
            print(f"FAULT: {line}", flush=True)

    def expect(self, kind: str, status: int, wanted: tuple[int, ...], body: bytes) -> None:
        """Count an answer, which is a fault unless its status is `wanted` or says that the server is busy."""
        if status in wanted or status in _BUSY:
            self.add(kind, str(status))
        else:
            self.fault(kind, str(status), body.decode(errors="replace"))


def text(rng: random.Random, words: int) -> str:
    """Random words."""
    return " ".join(rng.choices(_WORDS, k=words))


# A prefix that many prompts share, so that the prefix cache has hits as well.
_SHARED = text(random.Random(1), 120)


def _request(model: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a request as people send them, of a random kind."""
    prompt = text(rng, rng.choice((8, 30, 90, 250)))
    if rng.random() < 0.4:
        prompt = f"{_SHARED} {prompt}"
    tokens = rng.choice((4, 16, 48))
    messages = [{"role": "user", "content": prompt}]
    chat: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": tokens}
    number = rng.randrange(1_000_000)
    schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}, "required": []}
    function = {"name": f"f{number}", "parameters": schema}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (CHAT, {**chat, "stream": True}),
        (CHAT, {**chat, "n": 2, "logprobs": True, "top_logprobs": 3, "temperature": 0.7}),
        (CHAT, {**chat, "guided_json": schema}),
        (CHAT, {**chat, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}),
        (COMPLETIONS, {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}),
        (COMPLETIONS, {"model": model, "prompt": [prompt, prompt[:40]], "max_tokens": tokens, "echo": True}),
        (
            COMPLETIONS,
            {"model": model, "prompt": prompt, "max_tokens": tokens, "guided_regex": f"[a-z]+{number}"},
        ),
        (RESPONSES, {"model": model, "input": prompt, "max_output_tokens": max(16, tokens)}),
        (RESPONSES, {"model": model, "input": prompt, "max_output_tokens": 16, "stream": True}),
        ("/tokenize", {"model": model, "prompt": prompt}),
    ]
    return rng.choice(kinds)


async def normal(counts: Counts, address: str, model: str, rng: random.Random) -> None:
    """Several requests on one connection, each read to its end."""
    connection = await Connection.to(address)
    try:
        for _ in range(rng.randrange(1, 6)):
            path, body = _request(model, rng)
            async with asyncio.timeout(PATIENCE_S):
                await connection.send(request_bytes("POST", path, body))
                answer = await connection.answer()
            counts.expect("normal", answer.status, (200,), answer.body)
            if answer.status == 200 and body.get("stream") and b'"error":' in answer.body[-400:]:
                counts.fault("normal", "broken stream", answer.body[-200:].decode(errors="replace"))
    finally:
        connection.close()


async def cancelling(counts: Counts, address: str, model: str, rng: random.Random) -> None:
    """Hang up: before the request is whole, at once after it, or some chunks into a long answer."""
    path = rng.choice((CHAT, COMPLETIONS, RESPONSES))
    body: dict[str, Any] = {"model": model, "stream": rng.random() < 0.7}
    prompt = text(rng, 60)
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1000, "ignore_eos": True}
    elif path == COMPLETIONS:
        body |= {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "n": rng.choice((1, 4))}
    else:
        body |= {"input": prompt, "max_output_tokens": 1000}
    data = request_bytes("POST", path, body)
    connection = await Connection.to(address)
    try:
        if rng.random() < 0.15:
            await connection.send(data[: rng.randrange(len(data))])
            return counts.add("cancelling", "in the request")
        await connection.send(data)
        if not body["stream"] or rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.01, 0.3)))
            return counts.add("cancelling", "before the answer")
        async with asyncio.timeout(PATIENCE_S):
            status, headers = await connection.head()
            if status != 200:
                size = int(headers.get("content-length", 0))
                return counts.expect("cancelling", status, (200,), await connection.reader.readexactly(size))
            for _ in range(rng.randrange(1, 12)):
                if not await connection.chunk():
                    return counts.add("cancelling", "whole")
        counts.add("cancelling", "in the answer")
    finally:
        connection.close()
    return None


async def slow(counts: Counts, address: str, model: str, rng: random.Random) -> None:
    """Send a head or a body byte by byte, or read an answer much later than it is there."""
    body = {"model": model, "prompt": text(rng, 20), "max_tokens": 200, "stream": True, "ignore_eos": True}
    data = request_bytes("POST", COMPLETIONS, body)
    connection = await Connection.to(address, limit=1024)
    try:
        kind = rng.choice(("head", "body", "reading", "idle"))
        if kind == "idle":
            await asyncio.sleep(10)
        elif kind == "reading":
            await connection.send(data)
            await asyncio.sleep(1)
            async with asyncio.timeout(PATIENCE_S):
                while await connection.reader.read(64):
                    await asyncio.sleep(0.05)
                    if connection.reader.at_eof() or rng.random() < 0.01:
                        break
        else:
            cut = data.index(b"\r\n\r\n") + 4
            await connection.send(data[: 30 if kind == "head" else cut + 5])
            for byte in data[30:60] if kind == "head" else data[cut + 5 : cut + 35]:
                await connection.send(bytes((byte,)))
                await asyncio.sleep(0.5)
        counts.add("slow", kind)
    finally:
        connection.close()


class Neighbour:
    """One well-behaved stream after the other; its gaps are those between two chunks, in seconds."""

    def __init__(self, counts: Counts, address: str, model: str) -> None:
        self._counts = counts
        self._address = address
        self._body = {
            "model": model,
            "prompt": "The keeper of the lighthouse counts ships at night:",
            "max_tokens": 400,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.gaps: list[float] = []
        self.texts: Counter[str] = Counter()
        self._longest = 0.0

    def longest_since(self) -> float:
        """Return the longest gap since this was asked last."""
        longest, self._longest = self._longest, 0.0
        return longest

    async def turn(self) -> None:
        """One stream, read to its end."""
        connection = await Connection.to(self._address)
        said = ""
        try:
            await connection.send(request_bytes("POST", COMPLETIONS, self._body))
            async with asyncio.timeout(PATIENCE_S):
                status, _ = await connection.head()
            if status != 200:
                return self._counts.expect("neighbour", status, (200,), b"")
            last = None
            while True:
                async with asyncio.timeout(PATIENCE_S):
                    chunk = await connection.chunk()
                if not chunk:
                    break
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                    self._longest = max(self._longest, now - last)
                last = now
                for event in _events(chunk):
                    if "error" in event:
                        return self._counts.fault("neighbour", "broken stream", json.dumps(event["error"]))
                    said += "".join(choice["text"] for choice in event.get("choices", ()))
        finally:
            connection.close()
        self.texts[said] += 1
        return self._counts.add("neighbour", "200")


def _events(chunk: bytes) -> list[dict[str, Any]]:
    """Return the objects of a chunk's server-sent events; [DONE] is none."""
    return [json.loads(event[6:]) for event in chunk.decode().split("\n\n") if event.startswith("data: {")]


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
