"""What the block pool costs a scheduler that plans a step: 1,024 running sequences, 10,000 waiting.

python -m benchmarks.planning_kv

It uses no device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from catenary.blockhash import BlockHashes
from services.engine.kv import BlockPool


@dataclass
class Holder:
    """A sequence as far as the pool is concerned."""

    tokens: list[int]
    hashes: BlockHashes
    table: list[int]


class Scene:
    """A full pool: running sequences that share a system prompt, over the cached blocks of earlier ones."""

    def __init__(self, running: int, blocks_each: int, block_size: int, spare: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks_each, self.block_size = blocks_each, block_size
        total = int(running * blocks_each * (1 + spare))
        self.pool = BlockPool(total, block_size, prefix_caching=True)
        self.prompt = [self.rng.randrange(128_000) for _ in range(block_size * (blocks_each // 4))]
        self.holders: list[Holder] = []
        self.written = 128_000
        while self.pool.cached_count < total - blocks_each:
            self.pool.free(self.start().table)
        self.holders = [self.start() for _ in range(running)]

    def start(self) -> Holder:
        """Look up, acquire, allocate and publish a prompt, as its start and its prefill do."""
        rest = self.block_size * self.blocks_each - len(self.prompt)
        tokens = self.prompt + [self.rng.randrange(128_000) for _ in range(rest)]
        hashes = BlockHashes(self.block_size)
        hashes.extend(tokens)
        hits = self.pool.lookup(hashes.hashes)
        self.pool.acquire(hits)
        table = hits + self.pool.allocate(self.blocks_each - len(hits))
        holder = Holder(tokens, hashes, table)
        for index in range(len(hits), self.blocks_each):
            self.pool.publish(table[index], hashes.hashes[index])
        return holder

    def decode_step(self) -> None:
        """Do the pool's work of a step's decodes: one in `block_size` fills a block and gets the next.

        It evicts where the pool is full; a sequence beyond its size gives its last block back.
        """
        for holder in self.holders[:: self.block_size]:
            (block,) = self.pool.allocate(1)
            self.written += 1
            tokens = [self.written] * self.block_size
            names = BlockHashes(self.block_size).extend(tokens)
            self.pool.publish(block, names[0])
            old, holder.table[-1] = holder.table[-1], block
            self.pool.free([old])

    def turn_over(self) -> None:
        """A sequence ends and another one starts."""
        holder = self.holders.pop(0)
        self.pool.free(holder.table)
        self.holders.append(self.start())

    def look_up_heads(self, count: int) -> None:
        """Price the first waiting sequences: their hits, without taking them."""
        for holder in self.holders[:count]:
            self.pool.idle(self.pool.lookup(holder.hashes.hashes))


def timed(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and worst wall time of `repeats` runs, in milliseconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), max(times)


def main() -> None:
    """Build the scene and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=1024, help="sequences that hold blocks")
    parser.add_argument(
        "--waiting", type=int, default=10_000, help="prompts that are hashed once, on arrival"
    )
    parser.add_argument("--blocks", type=int, default=32, help="blocks of a sequence")
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a block")
    parser.add_argument("--spare", type=float, default=0.25, help="pool beyond the running ones, as a share")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scene = Scene(options.running, options.blocks, options.block_size, options.spare, options.seed)
    pool, prompt = scene.pool, scene.holders[0].tokens
    tables = [holder.table for holder in scene.holders]
    print(
        f"pool of {pool.total} blocks, {pool.used} in use by {options.running} sequences, "
        f"{pool.free_count} free or idle; {options.blocks} blocks of {options.block_size} tokens each\n"
    )
    rows: list[tuple[str, Callable[[], object], int]] = [
        ("a decode step: allocate, evict, hash, publish, free", scene.decode_step, options.repeats),
        ("a sequence ends, another starts with hits", scene.turn_over, options.repeats),
        ("look up the hits of 16 waiting heads", lambda: scene.look_up_heads(16), options.repeats),
        ("hash one prompt", lambda: BlockHashes(options.block_size).extend(prompt), options.repeats),
        ("take the names of all cached blocks", pool.events.names, 5),
        ("check all books with these tables", lambda: pool.check(tables), 5),
        ("check all books when idle", lambda: pool.check([]), 5),
    ]
    print(f"{'what':<54}{'median ms':>11}{'worst ms':>11}")
    for name, action, repeats in rows:
        tables[:] = [holder.table for holder in scene.holders]
        if name.endswith("idle"):
            for table in tables:
                pool.free(table)
        median, worst = timed(action, repeats)
        print(f"{name:<54}{median:>11.3f}{worst:>11.3f}")
    median, _ = timed(lambda: BlockHashes(options.block_size).extend(prompt), options.repeats)
    print(f"\n{options.waiting} waiting prompts are hashed once each: {median * options.waiting / 1e3:.2f} s")


if __name__ == "__main__":
    main()
