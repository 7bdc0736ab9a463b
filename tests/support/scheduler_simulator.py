"""Drives a scheduler with random events and checks every plan against a reference model."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from services.engine.domain import FinishReason, SamplingOptions
from services.engine.kv import BlockPool, Removed
from services.engine.scheduler import (
    Finished,
    Outcome,
    QueueFull,
    Scheduler,
    Scored,
    Sequence,
    SequenceRefused,
    SequenceStatus,
    StepPlan,
)
from tests.support.simulated_beams import BeamEvents
from tests.support.simulated_engine import VOCABULARY, Reference, Setup, SimulatedDevice, params

_SALTS = (b"", b"", b"tenant")


@dataclass
class Simulator(BeamEvents):
    """One engine under random events. `counts` says how often what happened."""

    setup: Setup
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setup = self.setup
        self.pool = BlockPool(setup.blocks, setup.block_size, prefix_caching=setup.prefix_caching)
        buckets = setup.buckets()
        self.most_blocks = buckets.max_decode_blocks
        self.scheduler = Scheduler(setup.config, self.pool, buckets)
        self.device = SimulatedDevice(self.pool, setup.config.max_num_seqs)
        self.live: dict[int, Reference] = {}
        self.in_flight: deque[tuple[StepPlan, dict[int, int]]] = deque()
        self.next_key = 0
        self.bases = [
            [self.rng.randrange(VOCABULARY) for _ in range(setup.config.max_model_len)] for _ in range(2)
        ]

    def run(self, events: int) -> None:
        """So many events, and then all that lives to its end."""
        depth = 2 if self.setup.overlapped else 1
        for number in range(events):
            draw, waits = self.rng.random(), len(self.in_flight)
            if draw < 0.14:
                self.add_beams() if self.rng.random() < self.setup.beams else self.add()
            elif draw < 0.18:
                self.abort()
            elif waits < depth and (not waits or draw < 0.62):
                self.plan()
            else:
                self.commit(fails=draw > 0.992)
            if not number % 16:
                self.check_books()
        self.drain()

    def drain(self) -> None:
        """Nobody starves: all that lives ends."""
        for _ in range(100_000):
            if not self.live and not self.in_flight:
                break
            if not self.in_flight or (self.setup.overlapped and len(self.in_flight) < 2 and self.live):
                self.plan()
            self.commit(fails=False)
        assert not self.live
        self.check_books()
        assert self.scheduler.plan() is None
        assert not self.scheduler.has_work
        assert self.pool.used == 0

    def add(self) -> None:
        """A new sequence, often with the beginning of an earlier one."""
        config, rng = self.setup.config, self.rng
        length = rng.choice(
            [
                rng.choice([1, 1, 1, config.max_model_len]),
                rng.randint(1, 8),
                *(rng.randint(1, config.max_model_len) for _ in "ab"),
            ]
        )
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        shared = rng.choice([0, length, length, rng.randint(0, length)])
        prompt[:shared] = rng.choice(self.bases)[:shared]
        if rng.random() < self.setup.alike:
            length = config.max_model_len * 3 // 4
            prompt = self.bases[0][:length]
        wanted = params(
            max_tokens=rng.choice([1, rng.randint(1, 12), config.max_model_len]),
            min_tokens=rng.choice([0, 0, rng.randint(0, 6)]),
            stops=rng.random() < 0.5,
            priority=rng.choice(self.setup.priorities),
        )
        if rng.random() < 0.1:
            wanted = replace(wanted, sampling=SamplingOptions(prompt_logprobs=0))
        self.next_key += 1
        sequence = Sequence(self.next_key, prompt, length, wanted, rng.choice(_SALTS))
        leader = self._leader_of(sequence) if rng.random() < self.setup.forked else None
        length = sequence.prompt_len
        full = len(self.live) >= config.max_num_seqs + config.max_waiting
        longest = min(config.max_model_len, length + wanted.max_tokens)
        fits = length < config.max_model_len and self.pool.blocks_for(longest - 1) <= self.pool.total
        try:
            self.scheduler.add(sequence, leader)
        except QueueFull:
            assert full
            self.counts["queue full"] += 1
        except SequenceRefused:
            assert not fits
            self.counts["refused"] += 1
        else:
            assert fits
            assert not full
            self.live[sequence.key] = Reference(sequence, config.max_model_len)
            self.counts["added"] += 1
            self.counts["waits for a prompt"] += sequence.key in self._held()

    def _leader_of(self, sequence: Sequence) -> int:
        """The key of some sequence, whose prompt this one gets too in most cases."""
        key = self.rng.choice([self.next_key - 1, *self.live])
        if key in self.live and self.live[key].sequence.token_ids and self.rng.random() < 0.9:
            leader = self.live[key].sequence
            sequence.token_ids = leader.token_ids[: leader.prompt_len]
            sequence.prompt_len, sequence.cache_salt = leader.prompt_len, leader.cache_salt
        return key

    def abort(self) -> None:
        """Ends a random sequence, or one that is not there; more often one in a state that is rare."""
        rare = [
            key
            for key, reference in self.live.items()
            if 0 < reference.computed < reference.length - 1
            or reference.sequence.status is SequenceStatus.PREEMPTED
        ]
        key = self.rng.choice([*self.live, *8 * rare, self.next_key + 1])
        reference = self.live.get(key)
        if reference is None:
            assert not self.scheduler.abort(key)
            return
        status = reference.sequence.status
        self.counts["abort in prefill"] += status is SequenceStatus.RUNNING and self._prefills(reference)
        members = self._members(reference.sequence)
        assert self.scheduler.abort(key)
        assert not self.scheduler.abort(key)
        for member in members:
            self.ended(self.live[member.key], status)

    def plan(self) -> None:
        """Plans a step, checks it and launches it."""
        before = {key: reference.sequence.status for key, reference in self.live.items()}
        ending = any(reference.length >= reference.sequence.longest for reference in self.live.values())
        free, growing = self.pool.free_count, self._growing()
        resting = set(self.scheduler.running.resting)
        plan = self.scheduler.plan()
        if plan is None:
            # Something is in flight, and what is not can only wait for it.
            assert not self.live or self.in_flight
            pending = all(r.sequence.num_pending for r in self.live.values())
            assert ending or resting or not self.live or pending
            self.counts["waits for a step in flight"] += bool(self.live)
            return
        self._check_victims(plan, before)
        starts = bool(self._started(before))
        # No preemption is in vain.
        assert not plan.preempted or starts or growing > free
        self._check_shape(plan)
        self._check_positions(plan, before)
        self._check_progress(plan, resting.union(sequence.key for sequence in self._started(before)))
        self.in_flight.append((plan, self.device.launch(plan, self.live, frozenset(self._kept()))))

    def commit(self, *, fails: bool) -> None:
        """Commits the earliest step in flight, or lets it fail."""
        if not self.in_flight:
            return
        plan, sampled = self.in_flight.popleft()
        if fails:
            for sequence in (*plan.sequences(), *plan.moved):
                status, members = sequence.status, self._members(sequence)
                if self.scheduler.end(sequence.key, FinishReason.ERROR) is not None:
                    for member in members:
                        self.ended(self.live[member.key], status)
            assert self.scheduler.commit(plan, {}) == []
            self.counts["failed steps"] += 1
            return
        lives = [one for one in plan.sampling() if one.key in self.live]
        alive = [sequence.key for sequence in lives if sequence.group is None]
        statuses = {key: self.live[key].sequence.status for key in alive}
        tokens = {key: token for key, token in sampled.items() if key in self.live or self.rng.random() < 0.5}
        outcomes = self.scheduler.commit(plan, tokens)
        taken = [outcome for outcome in outcomes if not isinstance(outcome, Scored)]
        assert [outcome.sequence.key for outcome in taken] == alive
        for one in taken:
            self._check_outcome(one, statuses[one.sequence.key])
        for outcome in outcomes:
            if isinstance(outcome, Scored):
                self.decide(outcome.group)

    def check_books(self) -> None:
        """Compares all books."""
        self.scheduler.check()
        load, references = self.scheduler.load(), self.live.values()
        running = [r for r in references if r.sequence.status is SequenceStatus.RUNNING]
        assert (load.running, load.waiting) == (len(running), len(references) - len(running))
        used = {block for reference in running for block in reference.sequence.block_table}
        assert load.used_blocks == len(used.union(self._kept()))
        self.counts["prompts that outlive their sequences"] += not used.issuperset(self._kept())
        resting = self.scheduler.running.resting
        starts = [r for r in running if self._prefills(r) and r.sequence.key not in resting]
        rests = sum(r.length - r.computed for r in starts)
        waiting = sum(len(r.sequence.token_ids) for r in references if r not in running)
        assert load.pending_prefill_tokens == rests + waiting
        if self.setup.prefix_caching:
            removed = sum(isinstance(event, Removed) for event in self.pool.events.drain())
            self.counts["evictions"] += removed

    def _check_outcome(self, outcome: Outcome, status: SequenceStatus) -> None:
        reference = self.live[outcome.sequence.key]
        tokens = outcome.sequence.token_ids
        assert tokens == reference.tokens[: len(tokens)]
        assert outcome.token_id == tokens[-1]
        assert isinstance(outcome, Finished) == (len(tokens) == len(reference.tokens))
        if isinstance(outcome, Finished):
            stops = outcome.reason is FinishReason.STOP
            assert outcome.reason is reference.reason
            assert outcome.stop_token_id == (tokens[-1] if stops else None)
            self.counts[f"ends by {outcome.reason.value}"] += 1
            self.counts["ends after preemption"] += outcome.sequence.num_preemptions > 0
            self.ended(reference, status)

    def ended(self, reference: Reference, status: SequenceStatus) -> None:
        sequence = reference.sequence
        assert (sequence.status, sequence.block_table, sequence.row) == (SequenceStatus.FINISHED, [], -1)
        self.counts[f"{status.value} to finished"] += 1
        self.counts["ends with a step in flight"] += self._flies(sequence)
        del self.live[sequence.key]
