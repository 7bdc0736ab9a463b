"""A fleet as placement sees it, without a router around it."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import Engine, Fleet
from services.router.index import KvIndex
from services.router.placement import (
    Candidates,
    Placed,
    PlacementOptions,
    PlacementRequest,
    Placer,
    Prefixes,
    ReceiptBook,
    policy_named,
)

BLOCK = 4


def request(
    name: str = "r", tokens: Sequence[int] = range(8), *, model: str = "m", **fields: Any
) -> PlacementRequest:
    """What is to be placed."""
    return PlacementRequest(name, model, tokens, len(tokens), **fields)


class World:
    """Engines, a policy and a placer; the test turns the clock and plays the engines.

    Prompts are in blocks of BLOCK tokens. `take` places a request and counts it as the dispatcher does.
    """

    def __init__(self, policy: str, engines: int = 0, *, seed: int = 1, **options: Any) -> None:
        self.now = 100.0
        self.fleet = Fleet(lease_s=1000)
        self.index: KvIndex[Engine] = KvIndex(100_000)
        self.prefixes = Prefixes(self.index, max_remembered=100_000)
        self.policy = policy_named(policy, random.Random(seed), PlacementOptions(**options))
        self.receipts = ReceiptBook(1000)
        self.placer = Placer(
            self.fleet,
            self.policy,
            retry_after_ms=50,
            prefixes=self.prefixes,
            receipts=self.receipts,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )
        self.reports = 0
        self.engines = [self.attach(f"e{number}") for number in range(engines)]

    def attach(self, name: str, *, model: str = "m", slots: int = 100, **fields: Any) -> Engine:
        """An engine joins, or joins again under its name."""
        capacity: dict[str, int] = {"block_size": BLOCK, "total_blocks": 10_000, "max_running": slots}
        capacity |= {key: fields.pop(key) for key in list(fields) if key in capacity}
        hello = engine_pb2.EngineHello(
            instance_id=f"{name}-{self.now}",
            engine_name=name,
            model=common_pb2.ModelInfo(name=model, max_model_len=10_000),
            capacity=engine_pb2.Capacity(**capacity),
            state=engine_pb2.ENGINE_STATE_SERVING,
            **fields,
        )
        return self.fleet.attach(hello, now=self.now, unix_time=0)[0]

    def leave(self, engine: Engine) -> None:
        """An engine is gone."""
        self.fleet.detach(engine)
        self.placer.forget(engine)

    def report(self, engine: Engine, **fields: Any) -> None:
        """An engine reports."""
        self.reports += 1
        engine.heard(self.now)
        state = fields.pop("state", engine_pb2.ENGINE_STATE_SERVING)
        engine.apply(engine_pb2.LoadReport(sequence=self.reports, state=state, **fields))

    def caches(self, engine: Engine, asked: PlacementRequest, blocks: int) -> None:
        """An engine tells that it has the first blocks of a prompt, and nothing else."""
        self.index.replace(engine, asked.names(engine.capacity.block_size)[:blocks])

    def place(self, asked: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """Where a request would go."""
        return self.placer.place(asked, excluding=excluding)

    def take(self, asked: PlacementRequest, *, excluding: Collection[Engine] = ()) -> Placed:
        """Place a request; its engine has it from here on."""
        placed = self.place(asked, excluding=excluding)
        placed.engine.placed_sequences += asked.sequences
        placed.engine.placed_tokens += len(asked.token_ids)
        placed.engine.placed_prefill += asked.uncached_tokens
        return placed

    def candidates(self, asked: PlacementRequest) -> Candidates:
        """What the policy is asked with."""
        columns = self.fleet.columns(asked.model)
        return Candidates(columns, np.flatnonzero(columns.open_to(None)), asked, self.prefixes, self.now)
