"""Load that never pauses, and what is killed under it. Counts what came of every request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from tests.support.e2e_stack import ProcessStack, serves, until
from tests.support.http import call
from tests.support.service_process import ServiceProcess
from tests.support.token_stream import TokenStream


class Question(Protocol):
    """A request that is on its way, and what it must be answered."""

    stream: TokenStream
    expected: str


class Load:
    """`streams` at a time, each followed by another until `stop`. `ask` sends a request."""

    def __init__(self, streams: int, ask: Callable[[], Question]) -> None:
        self._ask = ask
        self._stopping = False
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(streams)]
        self.asked = 0
        self.completed = 0
        self.exact = 0
        self.failures: list[str] = []

    async def stop(self) -> None:
        """Let what runs come to its end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def all_complete(self) -> None:
        """Every request was answered to its end."""
        assert self.failures == [], Counter(self.failures)
        assert self.asked == self.completed > 0

    def all_exact(self) -> None:
        """Every request was answered to its end, byte by byte as it must be."""
        self.all_complete()
        assert self.exact == self.asked

    async def _keep_asking(self) -> None:
        while not self._stopping:
            self.asked += 1
            one = self._ask()
            stream = await one.stream.finish(120)
            if stream.status != 200 or stream.error or stream.broken or not stream.done:
                self.failures.append(f"{stream.status} {stream.error} broken={stream.broken}")
                continue
            self.completed += 1
            self.exact += stream.text == one.expected


async def held(stack: ProcessStack, engine: str) -> int:
    """Sequences that all routers have placed on an engine."""
    fleets = [await stack.fleet(router.name) for router in stack.routers if router.alive]
    there = [one for fleet in fleets if fleet for one in fleet.engines]
    return sum(one.placed_sequences for one in there if one.engine_name == engine)


async def serving(stack: ProcessStack) -> int:
    """Engines that serve, as the first router sees it."""
    fleet = await stack.fleet()
    return sum(map(serves, fleet.engines)) if fleet else 0


async def kill_busy(
    stack: ProcessStack, victim: ServiceProcess, at_least: int, *, of: int, timeout_s: float
) -> None:
    """SIGKILL an engine while it runs so many sequences and `of` engines serve; start it again at once."""

    async def busy() -> bool:
        return await held(stack, victim.name) >= at_least and await serving(stack) >= of

    await until(busy, f"{at_least} sequences on {victim.name}", timeout_s=timeout_s)
    victim.kill()
    victim.start()


async def keep_killing(
    stack: ProcessStack, *, seconds: float, every_s: float, at_least: int, of: int, rng: random.Random
) -> int:
    """Kill one of `of` serving engines after another for so long. Returns how many were killed."""
    loop = asyncio.get_running_loop()
    until_time, kills = loop.time() + seconds, 0
    while loop.time() < until_time:
        await kill_busy(stack, rng.choice(stack.engines), at_least, of=of, timeout_s=90)
        kills += 1
        await asyncio.sleep(every_s)
    return kills


async def resumed(stack: ProcessStack) -> int:
    """Sequences that went on elsewhere, as the gateway counts them."""
    page = (await call(stack.address, "GET", "/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith("catenary_resumed_sequences_total{")]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
