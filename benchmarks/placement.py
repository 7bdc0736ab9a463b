"""What a placement costs the router: microseconds of CPU for each policy, by the number of engines.

python -m benchmarks.placement

The engines are loaded unevenly and tell what they have cached. Prompts begin with a system prompt that all
engines have; the rest is known to some of them or to none. Names of blocks are made before the clock runs, as
admission has them; what they cost is a line of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable

import catenary.grpc_environment  # noqa: F401
from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import Engine, Fleet
from services.router.index import KvIndex
from services.router.placement import (
    POLICIES,
    PlacementRequest,
    Placer,
    Prefixes,
    ReceiptBook,
    placement_request,
    policy_named,
)

BLOCK = 16
SHARED = 32
# Sequences that are placed at once.
LIVE = 50


class Scene:
    """A fleet under load and what it has cached."""

    def __init__(self, engines: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet(lease_s=1e9)
        self.index: KvIndex[Engine] = KvIndex(100_000_000)
        self.engines = [self._attach(number) for number in range(engines)]
        self.system = self._tokens(SHARED * BLOCK)
        for engine in self.engines:
            self.index.replace(engine, _request(self.system).names(BLOCK))
            running = self.rng.randrange(40)
            engine.apply(
                engine_pb2.LoadReport(
                    sequence=1,
                    state=engine_pb2.ENGINE_STATE_SERVING,
                    running=running,
                    used_blocks=running * 100,
                    pending_prefill_tokens=self.rng.randrange(3000),
                )
            )

    def requests(self, count: int, blocks: int, holders: int) -> list[PlacementRequest]:
        """Return prompts of so many blocks, each cached wholly by `holders` engines."""
        made = []
        for _ in range(count):
            tokens = [*self.system, *self._tokens((blocks - SHARED) * BLOCK), 1]
            spec = common_pb2.SequenceSpec(request_id="r", model="m", token_ids=tokens)
            request = placement_request(spec)
            names = list(request.names(BLOCK))
            for engine in self.rng.sample(self.engines, min(holders, len(self.engines))):
                self.index.stored(engine, names)
            made.append(request)
        return made

    def placer(self, policy: str) -> Placer:
        """Return a placer with a policy of its own."""
        return Placer(
            self.fleet,
            policy_named(policy, random.Random(1)),
            retry_after_ms=1,
            prefixes=Prefixes(self.index, max_remembered=1_000_000),
            receipts=ReceiptBook(1024),
            clock=lambda: 0.0,
        )

    def _attach(self, number: int) -> Engine:
        hello = engine_pb2.EngineHello(
            instance_id=f"i{number}",
            engine_name=f"engine-{number}",
            model=common_pb2.ModelInfo(name="m", max_model_len=100_000),
            capacity=engine_pb2.Capacity(
                block_size=BLOCK, total_blocks=20_000, max_running=256, max_waiting=64
            ),
            state=engine_pb2.ENGINE_STATE_SERVING,
            publishes_kv=True,
        )
        return self.fleet.attach(hello, now=0, unix_time=0)[0]

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(128_000), k=count)


def _request(tokens: list[int]) -> PlacementRequest:
    return PlacementRequest("r", "m", tokens, len(tokens))


def measure(placer: Placer, requests: Iterable[PlacementRequest]) -> list[float]:
    """Return the microseconds of CPU of each placement, each of which changes an engine's load."""
    took = []
    live: deque[tuple[Engine, PlacementRequest]] = deque()
    for request in requests:
        began = time.thread_time_ns()
        engine = placer.place(request).engine
        took.append((time.thread_time_ns() - began) / 1000)
        _count(engine, request, 1)
        live.append((engine, request))
        if len(live) > LIVE:
            _count(*live.popleft(), -1)
    for engine, request in live:
        _count(engine, request, -1)
    return took


def _count(engine: Engine, request: PlacementRequest, sign: int) -> None:
    engine.placed_sequences += sign
    engine.placed_tokens += sign * len(request.token_ids)
    engine.placed_prefill += sign * request.uncached_tokens


def naming(blocks: int, seed: int) -> float:
    """Return microseconds to name all blocks of a prompt."""
    tokens = random.Random(seed).choices(range(128_000), k=blocks * BLOCK)
    field = common_pb2.SequenceSpec(token_ids=tokens).token_ids
    began = time.thread_time_ns()
    for _ in range(20):
        list(PlacementRequest("r", "m", field, len(field)).names(BLOCK))
    return (time.thread_time_ns() - began) / 20_000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    out = sys.stdout
    out.write("| engines | policy | prompt, blocks | cached by | median us | p99 us |\n")
    out.write("| --- | --- | --- | --- | --- | --- |\n")
    for engines in args.engines:
        scene = Scene(engines, args.seed)
        for blocks, holders in ((128, 0), (128, 2), (1000, 2)):
            requests = scene.requests(args.requests, blocks, holders)
            for policy in sorted(POLICIES) if (blocks, holders) == (128, 2) else ["cost"]:
                took = sorted(measure(scene.placer(policy), requests))
                median, p99 = statistics.median(took), took[int(len(took) * 0.99)]
                out.write(f"| {engines} | {policy} | {blocks} | {holders} | {median:.0f} | {p99:.0f} |\n")
    for blocks in (128, 1000):
        out.write(f"naming {blocks} blocks: {naming(blocks, args.seed):.0f} us\n")


if __name__ == "__main__":
    main()
