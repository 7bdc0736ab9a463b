"""What following the prefix cache costs: the core a step, the servicer and a router too, and a snapshot.

Run: `python -m benchmarks.kv_events`. CPU time of one thread, median of many; no model is run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial

from catenary.v1 import engine_pb2
from services.engine.core.outputs import KvEventDelta
from services.engine.kv import BlockPool
from services.engine.link import KvChanges, KvContents
from services.engine.link.channel import DEFAULT_MAX_FRAME_BYTES, encode_frame
from services.engine.servicer import PrefixCacheMirror
from services.router.index import KvFeed, KvIndex

BLOCK_SIZE = 32
# Blocks that a step fills: one of 32 sequences, 256 sequences that decode, 8192 tokens of prompts.
STEPS = {"32 decode": 1, "256 decode": 8, "8192 prompt tokens": 256}


class Cache:
    """A pool that is full of cached blocks, so that each new one gives one up."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK_SIZE, prefix_caching=True)
        self.news = KvEventDelta(self.pool.events)
        self._names = (number.to_bytes(16, "big") for number in itertools.count())
        self.fill(blocks)

    def fill(self, count: int) -> None:
        """Publish so many blocks, which nobody uses then."""
        table = self.pool.allocate(count)
        for block in table:
            self.pool.publish(block, next(self._names))
        self.pool.free(table)


def microseconds(act: Callable[[], object], prepare: Callable[[], object], times: int) -> float:
    """Median CPU time of `act`, each after a `prepare` that is not counted."""
    spent = []
    for _ in range(times):
        prepare()
        start = time.thread_time_ns()
        act()
        spent.append((time.thread_time_ns() - start) / 1000)
    return statistics.median(spent)


def send(news: Iterable[KvContents | KvChanges]) -> None:
    """Encode the core's message."""
    for message in news:
        encode_frame(message, DEFAULT_MAX_FRAME_BYTES)


class Chain:
    """A cache, the servicer that follows it, and a router that follows that one; gRPC is left out."""

    def __init__(self, blocks: int) -> None:
        self.cache = Cache(blocks)
        self.mirror = PrefixCacheMirror()
        self.delta = self.mirror.join(max_pending=65_536)
        self.index: KvIndex[str] = KvIndex(4 * blocks)
        self.feed = KvFeed(self.index, "engine")
        self.news: list[KvContents | KvChanges] = []
        self.messages: list[bytes] = []
        self.cache.news.follow()
        for act in (self.core, self.servicer, self.send, self.router):
            act()

    def core(self) -> None:
        """Do the core's work after a step."""
        self.news = list(self.cache.news.due())
        send(self.news)

    def servicer(self) -> None:
        """Do the servicer's work on it."""
        for message in self.news:
            self.mirror.take(message)

    def send(self) -> None:
        """Return the message to a router, if it is time."""
        self.messages = [message.SerializeToString() for message in self.delta.take()]

    def router(self) -> None:
        """Do the router's work on it."""
        for data in self.messages:
            message = engine_pb2.PublishKvRequest.FromString(data)
            if message.HasField("snapshot"):
                self.feed.snapshot(message.snapshot)
            else:
                self.feed.changes(message.changes)


def _send_due(cache: Cache) -> None:
    send(cache.news.due())


def measure_steps(blocks: int, times: int) -> None:
    """Print the cost of a step that fills and gives up blocks."""
    print(
        f"{'microseconds a step':<22}{'not followed':>14}{'core':>8}{'servicer':>10}{'send':>8}{'router':>8}"
    )
    for name, filled in STEPS.items():
        cache = Cache(blocks)
        alone = microseconds(partial(_send_due, cache), partial(cache.fill, filled), times)
        chain = Chain(blocks)
        acts = (chain.core, chain.servicer, chain.send, chain.router)
        spent: list[list[float]] = [[] for _ in acts]
        for _ in range(times):
            chain.cache.fill(filled)
            for act, taken in zip(acts, spent, strict=True):
                start = time.thread_time_ns()
                act()
                taken.append((time.thread_time_ns() - start) / 1000)
        core, servicer, sent, router = map(statistics.median, spent)
        print(f"{name:<22}{alone:>14.1f}{core:>8.1f}{servicer:>10.1f}{sent:>8.1f}{router:>8.1f}")


def memory_of(parts: Iterable[KvContents | KvChanges]) -> int:
    """Return bytes of a servicer's copy."""
    gc.collect()
    tracemalloc.start()
    mirror = PrefixCacheMirror()
    for part in parts:
        mirror.take(part)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def measure_snapshots(sizes: Iterable[int]) -> None:
    """Print what all names cost to tell, and to keep in the servicer."""
    print(
        f"{'milliseconds a snapshot':<24}{'core':>14}{'servicer':>10}{'one router':>12}{'bytes a block':>16}"
    )
    for blocks in sizes:
        cache = Cache(blocks)
        cache.news.follow()
        start = time.thread_time()
        parts = list(cache.news.due())
        send(parts)
        core = time.thread_time() - start
        mirror = PrefixCacheMirror()
        start = time.thread_time()
        for part in parts:
            mirror.take(part)
        servicer = time.thread_time() - start
        held = memory_of(parts)
        delta = mirror.join(max_pending=65_536)
        start = time.thread_time()
        for message in delta.take():
            message.SerializeToString()
        router = time.thread_time() - start
        label = f"{blocks} blocks"
        print(
            f"{label:<24}{core * 1000:>14.1f}{servicer * 1000:>10.1f}{router * 1000:>12.1f}"
            f"{held / blocks:>16.0f}"
        )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=300)
    options = parser.parse_args()
    gc.disable()
    measure_steps(options.blocks, options.times)
    measure_snapshots((10_000, 100_000, 1_000_000))


if __name__ == "__main__":
    main()
