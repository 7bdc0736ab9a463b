"""What gateway, router and tokenizer add to a request's latency: beside the engine asked directly.

Run: `python -m benchmarks.added_latency`. Two scripted engines with one script, each a process: one behind
router, tokenizer and gateway (processes too), one attached to this process, which plays a router that does
nothing else. So both latencies have the engine's servicer and its gRPC stream in them, and the difference is
what a request gains on its way through the others and through HTTP. Rounds alternate between the two.

Counted is all that a client waits for: reading and checking the request, rendering, admission, placement,
each hop, the detokenizer, and what a request waits for behind the tokens of others in all of these processes,
which share this machine's cores with this client. Not counted is how long this client takes for answers: 64
streams get their tokens at once, and one process reads them one after another where 64 clients would not. So
what a turn of the loop has found to read counts as read when the turn began, as the played router's message
for all streams does.

Each of the streams is a closed loop. Lengths are drawn, so that the streams do not march in step, and are the
same both ways: requests are compared one by one. Each stream waits for a random part of a step before it asks
again: an engine takes what comes during a step at its end, so requests that were sent right behind the last
step's tokens would hide up to a step of delay.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import uvloop

import catenary.grpc_environment  # noqa: F401
from benchmarks.overhead import CpuMeter, PlayedRouter, SseConnection, Times
from benchmarks.overhead.sse_client import request_of
from tests.support.e2e_stack import ProcessStack, StackPlan
from tests.support.gateway import CHAT, MODEL, script
from tests.support.http import call
from tests.support.service_process import ServiceProcess
from tests.support.tiny_tokenizer import write_tiny_model

MESSAGES = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": "What is the largest city of the country that has the longest coast?"},
]
Ask = Callable[[int, int], Awaitable[Times]]
"""Asks for so many tokens on the stream of that number."""


async def closed_loop(ask: Ask, options: argparse.Namespace, seed: int) -> list[Times]:
    """Run one round: each stream asks again and again; the first request of each is a warm-up."""

    async def stream(number: int) -> list[Times]:
        chance = random.Random(f"{seed}.{number}")
        step_s, most = options.step_ms / 1e3, 3 * options.tokens // 2
        await asyncio.sleep(chance.random() * options.tokens * step_s)
        times = []
        for _ in range(options.requests + 1):
            await asyncio.sleep(chance.random() * step_s)
            times.append(await ask(number, chance.randint(options.tokens // 2, most)))
        return times[1:]

    return [one for many in await asyncio.gather(*map(stream, range(options.streams))) for one in many]


class Bench:
    """The processes, and the two ways to ask."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._options = options
        # Some places are kept for lanes of which no request comes here.
        capacity = {"max_running": 2 * options.streams, "total_blocks": 65_536, "max_batched_tokens": 65_536}
        played = directory / "script.json"
        played.write_bytes(msgspec.json.encode(script(step_delay_ms=options.step_ms, capacity=capacity)))
        flags = ("--script", str(played))
        reports = ("--report-interval-ms", "500", "--lease-ms", "10000")
        model = write_tiny_model(directory / "model")
        self.stack = ProcessStack(
            directory, StackPlan(model, MODEL, engine_flags=flags, router_flags=reports)
        )
        self.router = PlayedRouter(f"unix:{directory}/played.sock", MODEL)
        self._direct = ServiceProcess(
            "engine-direct",
            "catenary_testing.engine",
            (
                *("--listen", f"unix:{directory}/direct.sock", "--router", self.router.target),
                *("--served-model-name", MODEL, *self.stack.secrets.flags, *flags),
            ),
            directory,
        )
        self._connections: list[SseConnection] = []
        self._prompt: list[int] = []

    async def start(self) -> None:
        """Start all and wait until both ways are open."""
        self.stack.start()
        self._direct.start()
        await self.stack.ready(timeout_s=60)
        async with asyncio.timeout(30):
            await self.router.attached.wait()
        address = self.stack.address
        told = await call(address, "POST", "/tokenize", {"model": MODEL, "messages": MESSAGES})
        self._prompt = told.json()["tokens"]
        self._connections = [await SseConnection.to(address) for _ in range(self._options.streams)]

    def kill(self) -> None:
        """End all processes."""
        self.stack.kill()
        self._direct.kill()

    async def direct(self, _number: int, tokens: int) -> Times:
        """Ask the engine."""
        return await self.router.ask(self._prompt, tokens)

    async def through(self, number: int, tokens: int) -> Times:
        """Ask the gateway."""
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": tokens}
        request = request_of(CHAT, {**body, "stream": True, "ignore_eos": True})
        return await self._connections[number].ask(request)

    def meter(self) -> CpuMeter:
        """CPU time of the processes that a request passes."""
        stack = self.stack
        parts = {"gateway": stack.gateway, "router": stack.router, "tokenizer": stack.tokenizer}
        pids = {name: service.pid for name, service in parts.items()}
        (pids["tokenizer's worker"],) = stack.tokenizer.children
        pids |= {"engine": stack.engines[0].pid, "this client": os.getpid()}
        return CpuMeter(pids)


def row(name: str, direct: Sequence[float], through: Sequence[float]) -> str:
    """Return a line of the table: seconds of the same requests in milliseconds."""
    added = [1e3 * (there - here) for here, there in zip(direct, through, strict=True)]
    error = statistics.stdev(added) / math.sqrt(len(added))
    means = f"{1e3 * statistics.fmean(direct):.1f} | {1e3 * statistics.fmean(through):.1f}"
    spread = statistics.quantiles(added, n=20)
    return (
        f"| {name} | {means} | {statistics.fmean(added):.2f} ± {error:.2f} | {statistics.median(added):.2f} "
        f"| {spread[0]:.1f} to {spread[-1]:.1f} |"
    )


async def run(options: argparse.Namespace, directory: Path) -> None:
    """All rounds, then a table."""
    bench = Bench(directory, options)
    sides: dict[str, list[Times]] = {"direct": [], "through": []}
    usage: dict[str, float] = {}
    passed = 0.0
    try:
        async with bench.router:
            await bench.start()
            for seed in range(options.rounds):
                sides["direct"] += await closed_loop(bench.direct, options, seed)
                meter = bench.meter()
                meter.start()
                sides["through"] += await closed_loop(bench.through, options, seed)
                seconds, spent = meter.stop()
                passed += seconds
                usage = {name: usage.get(name, 0.0) + cpu for name, cpu in spent.items()}
    finally:
        bench.kill()
    print(f"{len(sides['through'])} requests of about {options.tokens} tokens, {options.streams} at once")
    print("| ms | direct, mean | through, mean | added, mean | added, median | added, 5 to 95 % |")
    print("| --- | --- | --- | --- | --- | --- |")
    firsts = ([times.first - times.asked for times in side] for side in sides.values())
    lasts = ([times.last - times.asked for times in side] for side in sides.values())
    print(row("to the first token", *firsts))
    print(row("to the last token", *lasts))
    print("CPU of a core: " + ", ".join(f"{name} {cpu / passed:.0%}" for name, cpu in usage.items()))
    # The warm-ups have cost as much.
    asked = options.rounds * options.streams * (options.requests + 1)
    each = ", ".join(f"{name} {1e3 * cpu / asked:.2f}" for name, cpu in usage.items())
    print(f"CPU of a request, ms, its tokens included, at {asked / passed:.0f} requests a second: {each}")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, default=32, help="tokens of an answer, half as many up to half more"
    )
    parser.add_argument("--requests", type=int, default=4, help="of each stream in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=30.0, help="duration of an engine's step")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as directory:
        uvloop.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
