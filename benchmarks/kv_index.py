"""What the router's KV index takes: memory for millions of blocks, and microseconds to fill and to ask it.

python -m benchmarks.kv_index --engines 64 1000

Each engine count is measured in a process of its own. Blocks belong to one engine, but for a share that all
have; names come in messages of 256, as engines send them. "us a block" is CPU of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

from services.router.index import KvIndex

MESSAGE = 256
CHAIN = 1000
# As a prompt's names come to the index.
PART = 16


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def names(rng: random.Random, count: int) -> list[bytes]:
    """So many names of blocks."""
    packed = rng.randbytes(16 * count)
    return [packed[start : start + 16] for start in range(0, len(packed), 16)]


def fill(index: KvIndex[int], engines: int, pairs: int, common: int, rng: random.Random) -> float:
    """Store so many pairs, `common` of them of blocks that all engines have. Returns microseconds a pair."""
    shared = names(rng, common // engines)
    spent = 0
    for engine in range(engines):
        index.replace(engine, ())
        own = pairs // engines - len(shared)
        sizes = [min(MESSAGE, own - start) for start in range(0, own, MESSAGE)]
        batches = [shared[start : start + MESSAGE] for start in range(0, len(shared), MESSAGE)]
        # Names from the wire are objects of their own for each engine.
        common_ones = ([name[:8] + name[8:] for name in batch] for batch in batches)
        for message in chain(common_ones, (names(rng, size) for size in sizes)):
            began = time.process_time_ns()
            index.stored(engine, message)
            spent += time.process_time_ns() - began
    return spent / 1000 / index.pairs


def asked(index: KvIndex[int], prompt: list[bytes], times: int) -> float:
    """Return microseconds to look a prompt up."""
    parts = [prompt[start : start + PART] for start in range(0, len(prompt), PART)]
    best = float("inf")
    for _ in range(times):
        began = time.process_time_ns()
        index.walk(parts).by_slot()
        best = min(best, (time.process_time_ns() - began) / 1000)
    return best


def measure(engines: int, pairs: int, seed: int) -> dict[str, float]:
    """Return one row of the table."""
    rng = random.Random(seed)
    before = rss_mib()
    index: KvIndex[int] = KvIndex(pairs)
    row: dict[str, float] = {"engines": engines}
    row["store, us a block"] = fill(index, engines, pairs, pairs // 10, rng)
    row["blocks"] = index.pairs
    row["RSS MiB"] = rss_mib() - before
    prompt = names(rng, CHAIN)
    for engine in (0, engines // 2):
        index.stored(engine, prompt)
    for engine in range(engines):
        index.stored(engine, prompt[: 1 + engine % CHAIN])
    row["chain of 1000 found, us"] = asked(index, prompt, 50)
    row["first block missing, us"] = asked(index, names(rng, CHAIN), 50)
    began = time.process_time_ns()
    count = index.blocks(1)
    index.forget(1)
    row["forget an engine, ms"] = (time.process_time_ns() - began) / 1e6
    row["of blocks"] = count
    row["at the bound, us a block"] = bounded(index, rng)
    return row


def bounded(index: KvIndex[int], rng: random.Random) -> float:
    """Return microseconds to store a block where another one has to go."""
    made = [names(rng, MESSAGE) for _ in range(400)]
    while index.pairs < index.max_pairs:
        index.stored(1, names(rng, 65_536))
    began = time.process_time_ns()
    for batch in made:
        index.stored(0, batch)
    return (time.process_time_ns() - began) / 1000 / (len(made) * MESSAGE)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        sys.stdout.write(json.dumps(measure(args.one, args.pairs, args.seed)))
        return
    for engines in args.engines:
        flags = ["--one", str(engines), "--pairs", str(args.pairs), "--seed", str(args.seed)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kv_index", *flags], check=True, capture_output=True, text=True
        )
        for name, value in json.loads(done.stdout).items():
            sys.stdout.write(f"{name}: {value:,.2f}\n")
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
