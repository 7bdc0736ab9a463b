"""The clients of a soak: normal, slow and cancelling ones, and a neighbour that must notice none of them."""

from __future__ import annotations

import asyncio
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
    """What came of the requests, by the kind of client; `unexpected` has the faults, each shown once."""

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
    """A request as people send them, of a random kind."""
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
    """Hangs up: before the request is whole, at once after it, or some chunks into a long answer."""
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
    """Sends a head or a body byte by byte, or reads an answer much later than it is there."""
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
        """The longest gap since this was asked last."""
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
    """The objects of a chunk's server-sent events; [DONE] is none."""
    return [json.loads(event[6:]) for event in chunk.decode().split("\n\n") if event.startswith("data: {")]
