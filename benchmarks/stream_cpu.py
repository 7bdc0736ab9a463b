"""What a streamed chunk costs each process on its way: gateway, router, engine servicer.

Run: `python -m benchmarks.stream_cpu`. All of them are processes, and the engines' cores are played by
further ones (`overhead.played_core`), which say a token of each of their sequences in every step: one token a
chunk. This process reads the streams. Between two moments in which all streams run, user and system time of
each process, all of its threads, is divided by the chunks that arrived here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import uvloop

import catenary.grpc_environment  # noqa: F401
from benchmarks.overhead import CpuMeter, SseConnection
from benchmarks.overhead.played_core import Played
from benchmarks.overhead.played_engine import PLAYED
from benchmarks.overhead.sse_client import request_of
from tests.support.e2e_stack import ProcessStack, StackPlan
from tests.support.gateway import CHAT, COMPLETIONS, MODEL
from tests.support.service_process import ServiceProcess
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_model

MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "completions": (COMPLETIONS, {"prompt": "hi"}),
    "chat, a stop string": (CHAT, {"messages": MESSAGES, "stop": ["never said"]}),
    "chat, usage in every chunk": (CHAT, {"messages": MESSAGES, **USAGE}),
    "chat, 5 log probabilities": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
}
# Plain letters with a space in front of them.
WORDS = list(range(7, 59))
_ENDLESS = 1 << 20


def make_stack(directory: Path, options: argparse.Namespace) -> ProcessStack:
    """Return the processes, not started."""
    reports = ("--report-interval-ms", "500", "--lease-ms", "10000")
    model = write_tiny_model(directory / "model")
    stack = ProcessStack(directory, StackPlan(model, MODEL, engines=0, router_flags=reports))
    # Some places are kept for lanes of which no request comes here.
    most = 2 * options.streams // options.engines
    played = Played(options.step_ms, most, 2 * _ENDLESS, VOCAB_SIZE, EOS_ID, WORDS)
    environment = {PLAYED: msgspec.json.encode(played).decode()}
    for number in range(options.engines):
        name = f"engine-{number}"
        flags = (
            *("--listen", stack.socket(name), "--router", stack.socket("router"), "--engine-name", name),
            *("--served-model-name", MODEL, *stack.secrets.flags),
        )
        module = "benchmarks.overhead.played_engine"
        stack.engines.append(ServiceProcess(name, module, flags, directory, environment))
    return stack


class Counter:
    """Chunks that came, and when every stream has begun."""

    def __init__(self, streams: int) -> None:
        self.chunks = 0
        self._missing = streams
        self.running = asyncio.Event()

    def began(self) -> None:
        """A stream's first chunk is here."""
        self._missing -= 1
        if not self._missing:
            self.running.set()


async def stream(address: str, request: bytes, counter: Counter) -> None:
    """One stream, until it is cancelled."""
    begun = False

    def on_chunks(count: int) -> None:
        nonlocal begun
        counter.chunks += count
        if not begun:
            begun = True
            counter.began()

    connection = await SseConnection.to(address, on_chunks)
    try:
        await connection.ask(request)
    finally:
        connection.close()


async def begun(counter: Counter, streams: list[asyncio.Task[None]]) -> None:
    """Wait until every stream runs. Raises what ends one of them, or TimeoutError."""
    running = asyncio.create_task(counter.running.wait())
    done, _ = await asyncio.wait((running, *streams), timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if running not in done:
        running.cancel()
        for task in done:
            task.result()
        raise TimeoutError("not all streams began")


async def measure(stack: ProcessStack, name: str, options: argparse.Namespace) -> str:
    """Return one case, as a row of the table."""
    path, fields = CASES[name]
    body = {"model": MODEL, "max_tokens": _ENDLESS, "stream": True, "ignore_eos": True, **fields}
    request, counter = request_of(path, body), Counter(options.streams)
    pids = {"gateway": stack.gateway.pid, "router": stack.router.pid, "client": os.getpid()}
    pids |= {engine.name: engine.pid for engine in stack.engines}
    meter = CpuMeter(pids)
    streams = [asyncio.create_task(stream(stack.address, request, counter)) for _ in range(options.streams)]
    try:
        await begun(counter, streams)
        await asyncio.sleep(1.0)
        before = counter.chunks
        meter.start()
        await asyncio.wait(streams, timeout=options.seconds)
        passed, spent = meter.stop()
        chunks = counter.chunks - before
    finally:
        for task in streams:
            task.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, Exception):
            raise failure
    await stack.idle()
    engines = sum(cpu for part, cpu in spent.items() if part.startswith("engine"))
    costs = [1e6 * cpu / chunks for cpu in (spent["gateway"], spent["router"], engines, spent["client"])]
    return f"| {name} | {chunks / passed:,.0f} | " + " | ".join(f"{cost:.1f}" for cost in costs) + " |"


async def run(options: argparse.Namespace, directory: Path) -> None:
    """All cases, as a table."""
    stack = make_stack(directory, options)
    stack.start()
    try:
        await stack.ready(timeout_s=60)
        print(
            f"{options.streams} streams, {options.engines} engines; CPU microseconds a chunk\n"
            "| case | chunks a second | gateway | router | engine servicers | this client |\n"
            "| --- | --- | --- | --- | --- | --- |"
        )
        for _ in range(options.repeat):
            for name in options.case or CASES:
                print(await measure(stack, name, options), flush=True)
        stack.stop()
    finally:
        stack.kill()


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=100.0, help="duration of an engine's step")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case")
    parser.add_argument("--repeat", type=int, default=1, help="how often each case is run")
    parser.add_argument("--case", action="append", choices=list(CASES))
    options = parser.parse_args()
    with TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as directory:
        uvloop.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
