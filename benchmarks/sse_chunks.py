"""What a streamed chunk costs the gateway: CPU time of its process, one token a chunk.

Run: `python -m benchmarks.sse_chunks`. Router, tokenizer, gateway and a scripted engine run as processes;
this one reads the streams. From when all streams run to when the first is about to end, user and system time
of the gateway's process, all of its threads, is divided by the chunks that arrived.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from tests.support.e2e_stack import ProcessStack, StackPlan
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, script
from tests.support.http import Connection, request_bytes
from tests.support.tiny_tokenizer import write_tiny_model

EDGE_TOKENS = 20
MESSAGES = [{"role": "user", "content": "hi"}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "completions": (COMPLETIONS, {"prompt": "hi"}),
    "chat, a stop string": (CHAT, {"messages": MESSAGES, "stop": ["never said"]}),
    "chat, usage in every chunk": (
        CHAT,
        {
            "messages": MESSAGES,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "chat, 5 log probabilities": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
}


@dataclass
class Meter:
    """Counts the chunks of all streams between two moments, and the CPU time of a process meanwhile."""

    process: psutil.Process
    streams: int
    tokens: int
    started: int = 0
    counting: bool = False
    done: bool = False
    chunks: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    seen: dict[int, int] = field(default_factory=dict)

    def chunk(self, stream: int) -> None:
        """A chunk of a stream came."""
        count = self.seen[stream] = self.seen.get(stream, 0) + 1
        if self.done:
            return
        if self.counting:
            self.chunks += 1
            if count >= self.tokens - EDGE_TOKENS:
                self.done = True
                self.spent = self._cpu() - self.spent
                self.seconds = asyncio.get_running_loop().time() - self.seconds
        elif count == EDGE_TOKENS:
            self.started += 1
            if self.started == self.streams:
                self.counting = True
                self.spent, self.seconds = self._cpu(), asyncio.get_running_loop().time()

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def read_stream(address: str, path: str, body: dict[str, Any], number: int, meter: Meter) -> None:
    """One stream, event by event."""
    connection = await Connection.to(address)
    await connection.send(request_bytes("POST", path, body))
    status, _ = await connection.head()
    if status != 200:
        raise RuntimeError(f"status {status}")
    while chunk := await connection.chunk():
        for _ in range(chunk.count(b"\n\n")):
            meter.chunk(number)
    connection.close()


async def measure(stack: ProcessStack, name: str, streams: int, tokens: int) -> Meter:
    """One case. Raises RuntimeError if a stream is refused."""
    path, fields = CASES[name]
    body = {"model": MODEL, "max_tokens": tokens, "stream": True, "ignore_eos": True, **fields}
    meter = Meter(psutil.Process(stack.gateway.pid), streams, tokens)
    await asyncio.gather(*(read_stream(stack.address, path, body, i, meter) for i in range(streams)))
    await stack.idle()
    return meter


async def run(options: argparse.Namespace, directory: Path) -> None:
    """All cases, as a table."""
    capacity = {"max_running": options.streams, "total_blocks": 65_536, "max_batched_tokens": 8_192}
    model = {"max_model_len": 2 * options.tokens + 64}
    played = directory / "script.json"
    played.write_bytes(
        msgspec.json.encode(script(step_delay_ms=options.step_ms, capacity=capacity, model=model))
    )
    plan = StackPlan(write_tiny_model(directory / "model"), MODEL, engine_flags=("--scripted", str(played)))
    stack = ProcessStack(directory, plan)
    stack.start()
    try:
        await stack.ready(timeout_s=60)
        print("| case | chunks | chunks a second | CPU microseconds a chunk |")
        print("| --- | --- | --- | --- |")
        for name in options.case or CASES:
            meter = await measure(stack, name, options.streams, options.tokens)
            rate, cost = meter.chunks / meter.seconds, 1e6 * meter.spent / meter.chunks
            print(f"| {name} | {meter.chunks:,} | {rate:,.0f} | {cost:.1f} |", flush=True)
        stack.stop()
    finally:
        stack.kill()


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=30.0, help="duration of an engine's step")
    parser.add_argument("--case", action="append", choices=list(CASES))
    options = parser.parse_args()
    with TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as directory:
        asyncio.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
