"""What a streamed chunk costs `catenary bench serve` itself: CPU time of the client, one token a chunk.

Run: `python -m benchmarks.bench_client`. An origin in another process writes ready-made chunks of a chat to
all streams at a fixed pace, each by a write of its own; the client is the command's, `catenary_apps.load`.
It keeps up if the chunks a second are those that the origin sends.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe
from typing import cast

import msgspec
import uvloop

from catenary_apps.load import Conversation, Endpoint, LoadPlan, Target, Turn, run

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"m"}]}'


def _event(value: object) -> bytes:
    text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    data = b"data: " + text + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk(finish: str | None = None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return _event({**head, "choices": [choice], "usage": None})


class _Origin(asyncio.Protocol):
    """Answers each request with `tokens` chunks, one every `pace_s`."""

    def __init__(self, tokens: int, pace_s: float) -> None:
        self._tokens = tokens
        self._pace_s = pace_s
        self._rest = b""
        usage = {"prompt_tokens": 1, "completion_tokens": tokens}
        self._token = _chunk(content=" word")
        self._end = (
            _chunk("length") + _event({"choices": [], "usage": usage}) + _event("[DONE]") + b"0\r\n\r\n"
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, end, body = self._rest.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._rest = b""
            self._write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._rest = b""
            self._write(_HEAD)
            self._start, self._sent = time.monotonic(), 0
            self._go_on()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            return
        self._write(self._token)
        self._sent += 1
        if self._sent == self._tokens:
            self._write(self._end)
            return
        due = self._start + self._sent * self._pace_s
        asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._go_on)

    def _write(self, data: bytes) -> None:
        self._transport.write(data)


def _serve(pipe: Pipe, tokens: int, pace_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Origin(tokens, pace_s), "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)
        server.close()

    uvloop.run(main())


def _measure(streams: int, tokens: int, rate: float) -> tuple[float, float, float]:
    """Return chunks a second, the client's CPU microseconds a chunk, and the cores that it kept busy."""
    here, there = multiprocessing.Pipe()
    origin = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, tokens, streams / rate))
    origin.start()
    try:
        target = Target(base_url=f"http://127.0.0.1:{here.recv()}", endpoint=Endpoint.CHAT)
        conversations = [Conversation((Turn("hi", tokens),))] * (2 * streams)
        result = run(
            LoadPlan(target=target, conversations=conversations, max_concurrency=streams, warmup=streams)
        )
    finally:
        here.send(None)
        origin.join(10)
    if result.failures or result.output_tokens != streams * tokens:
        raise RuntimeError(f"{result.failures}, {result.output_tokens} tokens")
    spent = 1e6 * result.client_cpu * result.duration_s / result.chunks
    return result.chunks / result.duration_s, spent, result.client_cpu


def main() -> None:
    """All rates, as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0, help="time that each rate takes")
    parser.add_argument("--rates", type=float, nargs="+", default=[2_500, 10_000, 20_000])
    options = parser.parse_args()
    print("| streams | chunks/s sent | chunks/s read | client CPU, us a chunk | cores |")
    print("| --- | --- | --- | --- | --- |")
    for rate in options.rates:
        tokens = max(2, round(options.seconds * rate / options.streams))
        reached, spent, cores = _measure(options.streams, tokens, rate)
        print(f"| {options.streams} | {rate:,.0f} | {reached:,.0f} | {spent:.1f} | {cores:.2f} |", flush=True)


if __name__ == "__main__":
    main()
