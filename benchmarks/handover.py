"""How fast the KV of a prompt moves from one engine's host memory to another's, by connector.

Run: `python -m benchmarks.handover [--tokens 8192] [--connector tcp]`. Two processes: one offers, one fetches
all blocks several times, with their checksums. The copies of devices are left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

from catenary.transfer import (
    BUILTIN,
    Fetch,
    Offered,
    TlsPaths,
    TransferError,
    TransferSettings,
    name_of,
    new_ticket,
)
from tests.support.certificates import make_authority, make_certificate

BLOCK_TOKENS = 32
# Of the demo model in bfloat16: 30 layers, 3 heads, 64 numbers, keys and values.
TOKEN_BYTES = 30 * 3 * 64 * 2 * 2
BINDING = LAYOUT = b"benchmark-------"
# As much as an engine copies at once.
CHUNK_BYTES = 8 << 20
MIB = 1 << 20


class Blocks:
    """Blocks of a host's memory that are there already. Implements BlockSource and PendingBlocks' part."""

    def __init__(self, count: int, size: int) -> None:
        self._data = memoryview(bytearray(os.urandom(1 << 20)) * (count * size // MIB + 1))[: count * size]
        self.ticket = new_ticket()
        self._offered = Offered(1, self.ticket, BINDING, LAYOUT, count, size)
        self.chunk_blocks = max(1, CHUNK_BYTES // size)

    def find(self, name: bytes) -> Offered | None:
        """See BlockSource."""
        return self._offered if name == name_of(self.ticket) else None

    def reading(self, offered: Offered) -> AbstractContextManager[None]:
        """See BlockSource."""
        return nullcontext()

    def read(self, offered: Offered, first: int, count: int) -> Read:
        """See BlockSource."""
        return Read(self._data[first * offered.block_bytes : (first + count) * offered.block_bytes])

    def fetched(self, offered: Offered) -> None:
        """Keep the offer."""


class Read:
    """A read that is done."""

    def __init__(self, blocks: memoryview) -> None:
        self._blocks = blocks

    def wait(self, timeout_s: float) -> memoryview:
        """See PendingBlocks."""
        return self._blocks


def offer(connector: str, settings: TransferSettings, blocks: int, size: int, pipe: Connection) -> None:
    """The offering process: tells where, and at the end how much CPU time it took."""
    source = Blocks(blocks, size)
    server = BUILTIN[connector](settings)
    pipe.send((server.serve(source), source.ticket, source.chunk_blocks))
    before = cpu_seconds()
    pipe.recv()
    pipe.send(cpu_seconds() - before)
    server.close()


def certificates(directory: Path) -> TlsPaths:
    """Return one for both sides, and the authority that has signed it. Needs openssl."""
    make_authority(directory, "authority")
    files = make_certificate(directory, "engine", "authority")
    return TlsPaths(str(files.cert), str(files.key), str(files.ca))


def cpu_seconds() -> float:
    """CPU time of this process and its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(connector: str, blocks: int, size: int, rounds: int, directory: Path) -> str:
    """Return a row of the table."""
    tls = certificates(directory) if connector == "tls" else None
    settings = TransferSettings("127.0.0.1:0", None, directory, 600.0, 4, tls)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=offer, args=(connector, settings, blocks, size, theirs)
    )
    process.start()
    # So that its end is heard of here.
    theirs.close()
    address, ticket, chunk = ours.recv()
    client = BUILTIN[connector](settings)
    took, before, mib = [], cpu_seconds(), blocks * size / MIB
    for _ in range(rounds):
        began = time.perf_counter()
        deadline = time.monotonic() + 600
        fetch = Fetch(ticket, address, BINDING, LAYOUT, 0, blocks, size, chunk, deadline)
        client.fetch(fetch, lambda _: None)
        took.append(time.perf_counter() - began)
    cpu = cpu_seconds() - before
    ours.send(None)
    sender_cpu = ours.recv()
    process.join()
    middle, best = statistics.median(took), min(took)
    figures = [f"{mib:,.0f}", f"{middle * 1000:,.0f}", f"{mib / middle:,.0f}", f"{mib / best:,.0f}"]
    figures += [f"{one * 1000 / rounds / mib:.2f}" for one in (cpu, sender_cpu)]
    return f"| {connector} | {' | '.join(figures)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--connector", choices=sorted(BUILTIN), help="one alone")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size = BLOCK_TOKENS * TOKEN_BYTES
    print("| connector | MiB | median ms | MiB/s, median | MiB/s, best | CPU ms/MiB, receiver | sender |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        for connector in [options.connector] if options.connector else sorted(BUILTIN):
            try:
                print(
                    measure(
                        connector, -(-options.tokens // BLOCK_TOKENS), size, options.rounds, Path(directory)
                    )
                )
            except (TransferError, EOFError) as error:
                print(f"| {connector} | failed: {error or 'the offering process has ended'} |")


if __name__ == "__main__":
    main()
