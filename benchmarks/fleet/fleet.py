"""Traffic on a fleet in virtual time: requests arrive, are placed by the router's own code, are computed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.fleet.engine import News, SimulatedEngine
from catenary.v1 import common_pb2, engine_pb2
from catenary_testing.engine import Script, ScriptedCapacity, ScriptedLatency, ScriptedModel
from services.router.admission import Ledger, LoadGuard, Refused
from services.router.fleet import Engine, Fleet
from services.router.index import KvIndex
from services.router.placement import (
    PlacementOptions,
    PlacementRequest,
    Placer,
    Prefixes,
    ReceiptBook,
    policy_named,
)

MODEL = "simulated"
BLOCK = 16


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet and what goes wrong in it. Times in seconds of virtual time.

    `faults`: moments at which one engine dies, another one taking its place `restart_s` later; sequences of a
    dead engine are placed again with the tokens they have. `slow_share` of the engines take 3 times as long.
    """

    engines: int = 8
    policy: str = "cost"
    seed: int = 1
    blocks: int = 4096
    slots: int = 64
    report_s: float = 0.5
    kv_s: float = 0.2
    publishes_kv: bool = True
    faults: tuple[float, ...] = ()
    restart_s: float = 5.0
    slow_share: float = 0.0
    options: PlacementOptions = field(default_factory=PlacementOptions)


@dataclass(slots=True)
class Outcome:
    """The result of a request."""

    arrived: float
    first_token: float | None = None
    ended: float | None = None
    tokens: int = 0
    placements: int = 0


@dataclass(slots=True)
class _Live:
    arrival: Arrival
    request: PlacementRequest
    guard: LoadGuard
    outcome: Outcome
    tokens: list[int]
    engine: SimulatedEngine | None = None


class FleetRun:
    """One run of a plan over arrivals. `outcomes` has all requests, later turns included, when it is over."""

    def __init__(self, plan: FleetPlan, arrivals: list[Arrival]) -> None:
        self.plan = plan
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self.loads: list[list[int]] = []
        self.prompt_tokens = self.cached_tokens = 0
        self._rng = random.Random(f"{plan.seed} fleet")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._keys = itertools.count(1)
        self._names = itertools.count()
        self._live: dict[int, _Live] = {}
        self._waiting: deque[_Live] = deque()
        self._left = len(arrivals)
        self._ledger = Ledger()
        self._fleet = Fleet(lease_s=1e9)
        self._index: KvIndex[Engine] = KvIndex(10_000_000)
        self._placer = Placer(
            self._fleet,
            policy_named(plan.policy, random.Random(f"{plan.seed} policy"), plan.options),
            retry_after_ms=100,
            prefixes=Prefixes(self._index, max_remembered=10_000_000),
            receipts=ReceiptBook(1),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )
        self.engines: dict[Engine, SimulatedEngine] = {}
        for number in range(plan.engines):
            self._attach(slow=number < plan.slow_share * plan.engines)
        for arrival in arrivals:
            self._at(arrival.at_s, lambda one=arrival: self._arrive(one))  # type: ignore[misc]
        for moment in plan.faults:
            self._at(moment, self._kill)
        self._at(1.0, self._sample)

    def run(self) -> FleetRun:
        """To the end of the last request."""
        while self._events and self._left:
            self.now, _, act = heapq.heappop(self._events)
            act()
        for engine in self.engines.values():
            self._count(engine)
        return self

    @property
    def idle(self) -> bool:
        """Whether nothing is live and all load has been given back."""
        placed = sum(engine.placed_sequences + engine.placed_prefill for engine in self.engines)
        return not self._live and not self._waiting and not self._ledger.sequences and not placed

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), act))

    def _attach(self, *, slow: bool = False) -> None:
        plan, name = self.plan, f"engine-{next(self._names)}"
        hello = engine_pb2.EngineHello(
            instance_id=name,
            engine_name=name,
            model=common_pb2.ModelInfo(name=MODEL, max_model_len=32_768, vocab_size=VOCABULARY),
            capacity=engine_pb2.Capacity(
                block_size=BLOCK, total_blocks=plan.blocks, max_running=plan.slots, max_batched_tokens=2048
            ),
            state=engine_pb2.ENGINE_STATE_SERVING,
            publishes_kv=plan.publishes_kv,
        )
        engine, _ = self._fleet.attach(hello, now=self.now, unix_time=0)
        script = Script(
            model=ScriptedModel(vocab_size=VOCABULARY, max_model_len=32_768),
            capacity=ScriptedCapacity(
                block_size=BLOCK,
                total_blocks=plan.blocks,
                max_running=plan.slots,
                max_waiting=plan.slots * 4,
                max_batched_tokens=2048,
                prefix_caching=True,
            ),
            # About an 8 B model on one card: 10,000 prompt tokens a second, 20 to 60 ms a decode step.
            latency=ScriptedLatency(
                step_base_ms=15, prefill_us_per_token=100, us_per_sequence=300, us_per_block=5
            ),
        )
        simulated = self.engines[engine] = SimulatedEngine(engine, script, self._index)
        simulated.slowness = 3.0 if slow else 1.0
        self._report(simulated)
        if plan.publishes_kv:
            self._publish(simulated)

    def _report(self, engine: SimulatedEngine) -> None:
        if engine.alive:
            engine.report(self.now)
            self._at(self.now + self.plan.report_s, lambda: self._report(engine))
            self._pump()

    def _publish(self, engine: SimulatedEngine) -> None:
        if engine.alive:
            if (hear := engine.tell_kv()) is not None:
                self._at(self.now + 0.001, lambda: hear() if engine.alive else None)
            self._at(self.now + self.plan.kv_s, lambda: self._publish(engine))

    def _sample(self) -> None:
        self.loads.append([engine.sequences for engine in self.engines])
        self._at(self.now + 1.0, self._sample)

    def _arrive(self, arrival: Arrival) -> None:
        outcome = Outcome(self.now)
        self.outcomes.append(outcome)
        tokens = list(arrival.token_ids)
        request = self._request(arrival, tokens)
        self._waiting.append(_Live(arrival, request, LoadGuard(self._ledger, len(tokens)), outcome, tokens))
        self._pump()

    def _request(self, arrival: Arrival, tokens: list[int]) -> PlacementRequest:
        return PlacementRequest(
            f"r{len(self.outcomes)}",
            MODEL,
            tuple(tokens),
            len(tokens),
            session_id=f"s{arrival.session}",
            kv_tokens=len(tokens),
        )

    def _pump(self) -> None:
        while self._waiting:
            live = self._waiting[0]
            try:
                engine = self._placer.place(live.request).engine
            except Refused:
                return
            self._waiting.popleft()
            simulated = self.engines[engine]
            live.engine, key = simulated, next(self._keys)
            live.guard.place(engine, live.request.uncached_tokens)
            live.outcome.placements += 1
            self._live[key] = live
            simulated.submit(key, live.tokens, live.arrival.max_tokens - live.outcome.tokens)
            self._step(simulated)

    def _step(self, engine: SimulatedEngine) -> None:
        if engine.alive and not engine.busy and engine.has_work:
            self._at(self.now + max(1e-4, engine.begin()), lambda: self._stepped(engine))

    def _stepped(self, engine: SimulatedEngine) -> None:
        if not engine.alive:
            return
        room = False
        for news in engine.finish():
            room |= self._hear(news)
        if room:
            self._pump()
        self._step(engine)

    def _hear(self, news: News) -> bool:
        live = self._live.get(news.key)
        if live is None:
            return False
        outcome = live.outcome
        if news.token_ids and outcome.first_token is None:
            outcome.first_token = self.now
        if news.token_ids:
            live.guard.prefilled()
        live.tokens += news.token_ids
        outcome.tokens += len(news.token_ids)
        if not news.ended:
            return False
        outcome.ended = self.now
        live.guard.release()
        del self._live[news.key]
        self._left -= 1
        if live.arrival.turns:
            self._left += 1
            turn, *rest = live.arrival.turns
            self._at(self.now + turn.pause_s, lambda: self._arrive(self._next(live, turn, rest)))
        return True

    def _next(self, live: _Live, turn: Turn, rest: list[Turn]) -> Arrival:
        said = [self._rng.randrange(3, VOCABULARY) for _ in range(turn.tokens)]
        return Arrival(self.now, live.tokens + said, turn.max_tokens, rest, live.arrival.session)

    def _kill(self) -> None:
        if not self.engines:
            return
        victim = self._rng.choice(list(self.engines.values()))
        self._count(victim)
        victim.close()
        del self.engines[victim.engine]
        self._fleet.detach(victim.engine)
        self._placer.forget(victim.engine)
        lost = [(key, live) for key, live in self._live.items() if live.engine is victim]
        for key, live in reversed(lost):
            del self._live[key]
            live.guard.unplace()
            live.request = self._request(live.arrival, live.tokens)
            self._waiting.appendleft(live)
        slow = victim.slowness > 1
        self._at(self.now + self.plan.restart_s, lambda: self._attach(slow=slow))
        self._pump()

    def _count(self, engine: SimulatedEngine) -> None:
        prompt, cached = engine.prompt_tokens
        self.prompt_tokens += prompt
        self.cached_tokens += cached


VOCABULARY = 30_000


@dataclass(slots=True)
class Arrival:
    """A request. `turns`: what the session asks afterwards, each with its pause after the answer before.

    A later turn's prompt is the one before it, its answer, and the new tokens.
    """

    at_s: float
    token_ids: list[int]
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    session: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """A further message of a session."""

    pause_s: float
    tokens: int
    max_tokens: int


def poisson(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """Independent prompts of 64 to 2,048 tokens at independent moments, `rate` of them a second."""
    now, made = 0.0, []
    for number in range(requests):
        now += rng.expovariate(rate)
        length = int(64 * 32 ** rng.random())
        made.append(Arrival(now, _tokens(rng, length), _answer(rng), session=number))
    return made


def bursty(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """As `poisson`, but they come in bursts of 32 on the average, ten times as fast, with rests between."""
    made = poisson(rng, requests, rate)
    now = 0.0
    left = 0
    for arrival in made:
        if left <= 0:
            left = 1 + int(rng.expovariate(1 / 32))
            now += rng.expovariate(rate / (left * 0.9))
        now += rng.expovariate(rate * 10)
        left -= 1
        arrival.at_s = now
    return made


def multi_turn(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """Sessions of 6 turns: one of 8 system prompts of 512 tokens, a document of 256 to 2,048 tokens of its
    own, then short messages, each with all that was said before. `requests` counts turns, and so does
    `rate`."""
    systems = [_tokens(rng, 512) for _ in range(8)]
    now, made = 0.0, []
    for number in range(max(1, requests // 6)):
        now += rng.expovariate(rate / 6)
        first = rng.choice(systems) + _tokens(rng, int(256 * 8 ** rng.random()))
        turns = [Turn(1 + rng.expovariate(1 / 4), rng.randint(16, 128), _answer(rng)) for _ in range(5)]
        made.append(Arrival(now, first, _answer(rng), turns, number))
    return made


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def _answer(rng: random.Random) -> int:
    return int(16 * 16 ** rng.random())


TRAFFIC: dict[str, Callable[[random.Random, int, float], list[Arrival]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "multi-turn": multi_turn,
}
