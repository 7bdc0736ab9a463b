"""`catenary bench serve` as a test runs it: against a polite server, with a small plan."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from catenary_apps.cli.main import main
from tests.support.sse_origin import Exchange, Origin, polite, running_origin

SMALL = ["--input-len", "5", "--output-len", "4", "--num-prompts", "3"]


@contextmanager
def origin_in_a_thread() -> Iterator[Origin]:
    """A polite server in a thread of its own, since the command has its own loop."""
    running: list[Origin] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.body["model"] == "refused":
            await exchange.refuse(503, "not now")
        else:
            await polite(exchange)

    async def serve() -> None:
        async with running_origin(answer) as made:
            running.append(made)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield running[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(10)
    loop.close()


def bench_serve(origin: Origin, *words: str) -> int:
    """The command's exit status."""
    return main(["bench", "serve", "--base-url", origin.address, *SMALL, *words])
