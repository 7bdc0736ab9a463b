"""Random events against the scheduler, over a KV memory that notices wrong, shared and stale slots."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import Bucket, BucketLimits, BucketPlan, build_plan
from services.engine.kv import BlockPool
from services.engine.link import FinishReason
from services.engine.scheduler import (
    Finished,
    QueueFull,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceParams,
    SequenceRefused,
    SequenceStatus,
    StepPlan,
)

VOCABULARY = 50
STOP_ID = 7


@dataclass(frozen=True)
class Setup:
    """One engine: limits of the scheduler, its pool and its buckets."""

    config: SchedulerConfig
    blocks: int
    block_size: int
    strategy: str = "exponential"
    decode_maxima: tuple[int, int] | None = None

    def buckets(self) -> BucketPlan:
        plan = build_plan(
            self.strategy,
            BucketLimits(
                self.block_size,
                self.config.max_model_len,
                self.config.max_num_seqs,
                self.config.max_num_batched_tokens,
                self.blocks,
                self.config.max_prefill_seqs,
            ),
        )
        if self.decode_maxima is None:
            return plan
        batch, blocks = self.decode_maxima
        decode = [Bucket(b, 1, c) for b in range(1, batch + 1) for c in range(b, blocks + 1)]
        return BucketPlan(plan.prefill, decode, self.block_size)


def next_token(token_ids: list[int], *, mask_stops: bool) -> int:
    """The model: a function of all tokens before, so any mistake in a context changes all that follows."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()
    token = int.from_bytes(digest, "big") % VOCABULARY
    return token + 1 if mask_stops and token == STOP_ID else token


def expected_end(prompt: list[int], params: SequenceParams, limit: int) -> tuple[list[int], FinishReason]:
    """What the sequence must come to if nobody ends it."""
    tokens = list(prompt)
    while True:
        made = len(tokens) - len(prompt)
        token = next_token(tokens, mask_stops=made < params.min_tokens)
        tokens.append(token)
        if token in params.stop_ids and made + 1 > params.min_tokens:
            return tokens, FinishReason.STOP
        if made + 1 >= params.max_tokens or len(tokens) >= limit:
            return tokens, FinishReason.LENGTH


@dataclass
class Simulator:
    setup: Setup
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        config = self.setup.config
        self.pool = BlockPool(self.setup.blocks, self.setup.block_size)
        self.scheduler = Scheduler(config, self.pool, self.setup.buckets())
        self.live: dict[int, tuple[Sequence, list[int]]] = {}
        # slot -> (sequence, life, position, token)
        self.kv: dict[int, tuple[int, int, int, int]] = {}
        self.computed: set[tuple[int, int, int]] = set()
        self.idle_steps: Counter[int] = Counter()
        self.next_key = 0

    def add(self) -> None:
        config, rng = self.setup.config, self.rng
        length = rng.choice([1, rng.randint(1, 8), rng.randint(1, config.max_model_len)])
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        params = SequenceParams(
            max_tokens=rng.choice([1, rng.randint(1, 12), config.max_model_len]),
            min_tokens=rng.choice([0, 0, rng.randint(0, 6)]),
            stop_ids=frozenset(rng.choice([(), (STOP_ID,)])),
        )
        self.next_key += 1
        sequence = Sequence(self.next_key, list(prompt), length, params)
        full = len(self.live) >= config.max_num_seqs + config.max_waiting
        fits = length < config.max_model_len and (
            self.pool.blocks_for(min(config.max_model_len, length + params.max_tokens) - 1) <= self.pool.total
        )
        try:
            self.scheduler.add(sequence)
        except QueueFull:
            assert full
            self.counts["full"] += 1
        except SequenceRefused:
            assert not fits
            self.counts["refused"] += 1
        else:
            assert fits
            assert not full
            self.live[sequence.key] = (sequence, prompt)
            self.counts["added"] += 1

    def abort(self) -> None:
        key = self.rng.choice([*self.live, self.next_key + 1])
        state = self.live[key][0].status if key in self.live else None
        assert self.scheduler.abort(key) == (key in self.live)
        assert not self.scheduler.abort(key)
        if state is not None:
            sequence = self.live.pop(key)[0]
            assert sequence.block_table == []
            self.counts[f"abort {state.value}"] += 1
            if state is SequenceStatus.RUNNING and sequence.num_uncomputed_tokens > 1:
                self.counts["abort mid-prefill"] += 1

    def step(self, abort_in_flight: bool) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.live
            return
        self.check_plan(plan)
        sampled = self.forward(plan)
        if abort_in_flight and self.live:
            self.abort()
            self.counts["abort in flight"] += 1
        for outcome in self.scheduler.commit(plan, sampled):
            assert outcome.sequence.key in self.live
            if isinstance(outcome, Finished):
                self.finished(outcome)
        self.counts["steps"] += 1

    def finished(self, outcome: Finished) -> None:
        sequence, prompt = self.live.pop(outcome.sequence.key)
        tokens, reason = expected_end(prompt, sequence.params, self.setup.config.max_model_len)
        assert (sequence.token_ids, outcome.reason) == (tokens, reason)
        assert outcome.stop_token_id == (STOP_ID if reason is FinishReason.STOP else None)
        assert sequence.block_table == []
        self.idle_steps.pop(sequence.key, None)
        self.counts[f"finished {reason.value}"] += 1
        self.counts["finished after preemption"] += sequence.num_preemptions > 0

    def check_plan(self, plan: StepPlan) -> None:
        config, size = self.setup.config, self.setup.block_size
        chunks, rows = plan.prefills, plan.decodes
        assert 1 <= plan.num_tokens <= config.max_num_batched_tokens
        assert len(chunks) <= config.max_prefill_seqs
        running = [s for s, _ in self.live.values() if s.status is SequenceStatus.RUNNING]
        assert len(running) <= config.max_num_seqs
        planned = [chunk.sequence for chunk in chunks] + [row.sequence for row in rows]
        assert len({s.key for s in planned}) == len(planned)
        assert all(s.status is SequenceStatus.RUNNING for s in planned)
        assert all(s.status is SequenceStatus.PREEMPTED and not s.block_table for s in plan.preempted)
        if chunks:
            query = max(chunk.length for chunk in chunks)
            context = max(-(-chunk.start // size) for chunk in chunks)
            assert plan.bucket_prefill is not None
            assert plan.bucket_prefill.covers(len(chunks), query, context)
            assert plan.bucket_prefill.batch * plan.bucket_prefill.query <= config.max_num_batched_tokens
        if rows:
            total = sum(row.position // size + 1 for row in rows)
            assert plan.bucket_decode is not None
            assert plan.bucket_decode.covers(len(rows), 1, total)
        assert (plan.bucket_prefill is None, plan.bucket_decode is None) == (not chunks, not rows)
        self.check_progress(planned, running)
        self.counts["preemptions"] += len(plan.preempted)
        self.counts["chunks"] += sum(not chunk.samples for chunk in chunks)
        self.counts["mixed steps"] += bool(chunks and rows)
        self.counts["prefill batches"] += len(chunks) > 1
        decodable = sum(s.num_uncomputed_tokens == 1 and s.num_computed_tokens > 0 for s in running)
        self.counts["splits"] += decodable > len(rows)

    def check_progress(self, planned: list[Sequence], running: list[Sequence]) -> None:
        """Every step serves all that decode, unless a split makes them take turns."""
        served = {s.key for s in planned}
        for sequence in running:
            waits = sequence.num_uncomputed_tokens == 1 and sequence.key not in served
            self.idle_steps[sequence.key] = self.idle_steps[sequence.key] + 1 if waits else 0
            assert self.idle_steps[sequence.key] < self.setup.config.max_num_seqs
            assert not waits or self.setup.decode_maxima is not None

    def forward(self, plan: StepPlan) -> dict[int, int]:
        sampled: dict[int, int] = {}
        for chunk in plan.prefills:
            self.compute(chunk.sequence, chunk.start, chunk.end)
            assert chunk.samples == (chunk.end == len(chunk.sequence.token_ids))
            if chunk.samples:
                sampled[chunk.sequence.key] = next_token(
                    chunk.sequence.token_ids, mask_stops=chunk.mask_stops
                )
        for row in plan.decodes:
            assert row.position == len(row.sequence.token_ids) - 1
            assert row.token == row.sequence.token_ids[row.position]
            self.compute(row.sequence, row.position, row.position + 1)
            sampled[row.sequence.key] = next_token(row.sequence.token_ids, mask_stops=row.mask_stops)
        assert list(sampled) == [sequence.key for sequence in plan.sampling()]
        return sampled

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        """Writes KV for [start, end) and reads all before, as attention does."""
        size, life = self.setup.block_size, sequence.num_preemptions
        for position in range(end):
            slot = sequence.block_table[position // size] * size + position % size
            entry = (sequence.key, life, position, sequence.token_ids[position])
            if position < start:
                assert self.kv[slot] == entry
            else:
                assert entry[:3] not in self.computed
                self.computed.add(entry[:3])
                self.kv[slot] = entry

    def check_books(self) -> None:
        self.scheduler.check()
        load = self.scheduler.load()
        assert load.running + load.waiting == len(self.live)
        running = [s for s, _ in self.live.values() if s.status is SequenceStatus.RUNNING]
        assert load.running == len(running)
        assert load.used_blocks == sum(len(s.block_table) for s in running)
        uncomputed = sum(s.num_uncomputed_tokens for s, _ in self.live.values())
        assert load.pending_prefill_tokens == uncomputed - sum(s.num_uncomputed_tokens == 1 for s in running)

    def run(self, events: int) -> None:
        for _ in range(events):
            draw = self.rng.random()
            if draw < 0.25:
                self.add()
            elif draw < 0.29:
                self.abort()
            else:
                self.step(abort_in_flight=draw > 0.97)
            if self.counts["steps"] % 16 == 0:
                self.check_books()
        self.drain()

    def drain(self) -> None:
        for _ in range(200_000):
            if not self.live:
                break
            self.step(abort_in_flight=False)
        assert not self.live
        self.check_books()
        assert self.scheduler.plan() is None
        assert not self.scheduler.has_work
        assert self.pool.used == 0


SETUPS = {
    "roomy": Setup(SchedulerConfig(64, 8, 8, 32, 2), 64, 4),
    "tight": Setup(SchedulerConfig(48, 8, 12, 16, 3), 14, 4, "linear"),
    "one at a time": Setup(SchedulerConfig(40, 1, 3, 8, 1), 10, 4),
    "no queue": Setup(SchedulerConfig(40, 4, 0, 4, 4), 12, 8),
    "split by blocks": Setup(SchedulerConfig(40, 6, 6, 24, 2), 30, 4, decode_maxima=(6, 13)),
    "split by rows": Setup(SchedulerConfig(40, 6, 6, 24, 2), 30, 4, decode_maxima=(2, 20)),
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_invariants_hold_under_random_events(name: str, seed: int) -> None:
    Simulator(SETUPS[name], random.Random(seed)).run(1500)


def test_everything_that_can_happen_does_happen() -> None:
    counts: Counter[str] = Counter()
    for setup in SETUPS.values():
        Simulator(setup, random.Random(3), counts).run(1200)
    for event in (
        "full",
        "refused",
        "preemptions",
        "chunks",
        "mixed steps",
        "prefill batches",
        "splits",
        "abort waiting",
        "abort running",
        "abort preempted",
        "abort mid-prefill",
        "abort in flight",
        "finished stop",
        "finished length",
        "finished after preemption",
    ):
        assert counts[event] >= 5, (event, counts)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_invariants_hold_for_any_limits(data: st.DataObject) -> None:
    seqs = data.draw(st.integers(1, 6))
    config = SchedulerConfig(
        max_model_len=data.draw(st.integers(2, 60)),
        max_num_seqs=seqs,
        max_waiting=data.draw(st.integers(0, 6)),
        max_num_batched_tokens=data.draw(st.integers(seqs, 40)),
        max_prefill_seqs=data.draw(st.integers(1, 4)),
    )
    setup = Setup(
        config,
        blocks=data.draw(st.integers(1, 30)),
        block_size=data.draw(st.integers(1, 20)),
        strategy=data.draw(st.sampled_from(["linear", "exponential"])),
    )
    Simulator(setup, random.Random(data.draw(st.integers(0, 2**32)))).run(120)
