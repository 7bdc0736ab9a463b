"""What a hop costs by itself: a call and a message on a stream to an echo, by bare grpc.aio on a unix socket.

Run: `python -m benchmarks.hops`. The echo is a process of its own. Calls come one at a time: at a given rate,
as many as the requests of `added_latency` by default, and back to back. The difference is what caches forget
between two of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import uvloop

import catenary.grpc_environment  # noqa: F401
from benchmarks.overhead import CpuMeter

PAYLOAD = bytes(300)


async def _echo(request: bytes, _context: Any) -> bytes:
    return request


async def _echoes(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def serve(target: str) -> None:
    """The echo, until it is killed."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Call": grpc.unary_unary_rpc_method_handler(_echo),
        "Stream": grpc.stream_stream_rpc_method_handler(_echoes),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", methods),))
    server.add_insecure_port(target)
    await server.start()
    await server.wait_for_termination()


async def measure(ask: Callable[[], Awaitable[object]], count: int, rate: float, pid: int) -> str:
    """Return cells of a row: there and back, and CPU of the echo and of this process."""
    meter, seconds, chance = CpuMeter({"echo": pid}), [], random.Random(0)
    meter.start()
    own = time.process_time()
    for _ in range(count):
        if rate:
            await asyncio.sleep(chance.uniform(0.5, 1.5) / rate)
        began = time.perf_counter()
        await ask()
        seconds.append(time.perf_counter() - began)
    own = time.process_time() - own
    _, spent = meter.stop()
    cells = statistics.fmean(seconds), statistics.median(seconds), spent["echo"] / count, own / count
    return " | ".join(f"{1e3 * cell:.2f}" for cell in cells)


async def run(options: argparse.Namespace, target: str) -> None:
    """The echo, and a table."""
    command = (sys.executable, "-m", "benchmarks.hops", "--serve", target)
    echo = await asyncio.create_subprocess_exec(*command)
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            call: Any = channel.unary_unary("/Echo/Call")
            await call(PAYLOAD, wait_for_ready=True, timeout=30)
            stream: Any = channel.stream_stream("/Echo/Stream")()

            async def message() -> None:
                await stream.write(PAYLOAD)
                await stream.read()

            print("| ms | mean | median | CPU of the echo | CPU of the caller |")
            print("| --- | --- | --- | --- | --- |")
            for rate in (options.rate, 0.0):
                pace = f"{rate:g} a second" if rate else "back to back"
                for name, ask in (("call", lambda: call(PAYLOAD)), ("message and answer", message)):
                    print(f"| {name}, {pace} | {await measure(ask, options.count, rate, echo.pid)} |")
    finally:
        echo.kill()


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--serve", metavar="TARGET", help="be the echo")
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    with TemporaryDirectory() as directory:
        uvloop.run(run(options, f"unix:{Path(directory)}/echo.sock"))


if __name__ == "__main__":
    main()
