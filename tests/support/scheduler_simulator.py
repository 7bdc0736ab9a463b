"""Drives a scheduler with random events and checks every plan against a reference model."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from services.engine.kv import BlockPool, Removed
from services.engine.link import FinishReason, SamplingOptions
from services.engine.scheduler import (
    Finished,
    Outcome,
    QueueFull,
    Scheduler,
    Sequence,
    SequenceRefused,
    SequenceStatus,
    StepPlan,
)
from tests.support.simulated_engine import VOCABULARY, Reference, Setup, SimulatedDevice, params

_SALTS = (b"", b"", b"tenant")


@dataclass
class Simulator:
    """One engine under random events. `counts` says how often what happened."""

    setup: Setup
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setup = self.setup
        self.pool = BlockPool(setup.blocks, setup.block_size, prefix_caching=setup.prefix_caching)
        self.scheduler = Scheduler(setup.config, self.pool, setup.buckets())
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
                self.add()
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
        if key in self.live and self.rng.random() < 0.9:
            leader = self.live[key].sequence
            sequence.token_ids = leader.token_ids[: leader.prompt_len]
            sequence.prompt_len, sequence.cache_salt = leader.prompt_len, leader.cache_salt
        return key

    def _held(self) -> set[int]:
        """Keys of what waits for another's prompt."""
        groups = self.scheduler._shared._of.values()
        return {sequence.key for shared in groups for sequence in shared.held}

    def _kept(self) -> list[int]:
        """Blocks of shared prompts; a prompt has each once."""
        return [block for table in self.scheduler._shared.tables() for block in table]

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
        assert self.scheduler.abort(key)
        assert not self.scheduler.abort(key)
        self._ended(reference, status)

    def plan(self) -> None:
        """Plans a step, checks it and launches it."""
        before = {key: reference.sequence.status for key, reference in self.live.items()}
        ending = any(reference.length >= reference.sequence.longest for reference in self.live.values())
        free, growing = self.pool.free_count, self._growing()
        plan = self.scheduler.plan()
        if plan is None:
            # Something is in flight, and what is not can only wait for it.
            assert not self.live or self.in_flight
            assert ending or not self.live or all(r.sequence.num_pending for r in self.live.values())
            self.counts["waits for a step in flight"] += bool(self.live)
            return
        self._check_victims(plan, before)
        starts = bool(self._started(before))
        # Nobody gives way in vain.
        assert not plan.preempted or starts or growing > free
        self._check_shape(plan)
        self._check_positions(plan, before)
        self._check_progress(plan, self._started(before))
        self.in_flight.append((plan, self.device.launch(plan, self.live, frozenset(self._kept()))))

    def commit(self, *, fails: bool) -> None:
        """Commits the earliest step in flight, or lets it fail."""
        if not self.in_flight:
            return
        plan, sampled = self.in_flight.popleft()
        if fails:
            for sequence in plan.sequences():
                status = sequence.status
                if self.scheduler.end(sequence.key, FinishReason.ERROR) is not None:
                    self._ended(self.live[sequence.key], status)
            assert self.scheduler.commit(plan, {}) == []
            self.counts["failed steps"] += 1
            return
        alive = [sequence.key for sequence in plan.sampling() if sequence.key in self.live]
        statuses = {key: self.live[key].sequence.status for key in alive}
        tokens = {key: token for key, token in sampled.items() if key in self.live or self.rng.random() < 0.5}
        outcomes = self.scheduler.commit(plan, tokens)
        assert [outcome.sequence.key for outcome in outcomes] == alive
        for outcome in outcomes:
            self._check_outcome(outcome, statuses[outcome.sequence.key])

    def check_books(self) -> None:
        """Compares all books."""
        self.scheduler.check()
        load, references = self.scheduler.load(), self.live.values()
        running = [r for r in references if r.sequence.status is SequenceStatus.RUNNING]
        assert (load.running, load.waiting) == (len(running), len(references) - len(running))
        used = {block for reference in running for block in reference.sequence.block_table}
        assert load.used_blocks == len(used.union(self._kept()))
        self.counts["prompts that outlive their sequences"] += not used.issuperset(self._kept())
        rests = sum(r.length - r.computed for r in running if self._prefills(r))
        waiting = sum(len(r.sequence.token_ids) for r in references if r not in running)
        assert load.pending_prefill_tokens == rests + waiting
        if self.setup.prefix_caching:
            removed = sum(isinstance(event, Removed) for event in self.pool.events.drain())
            self.counts["evictions"] += removed

    def _check_victims(self, plan: StepPlan, before: dict[int, SequenceStatus]) -> None:
        """The last in order give way, or less urgent ones to one that starts now. Nobody overtakes."""
        running, waiting, held = SequenceStatus.RUNNING, self.live.values(), self._held()
        started = self._started(before)
        stay = [
            r.sequence for r in waiting if before[r.sequence.key] is running and r.sequence.status is running
        ]
        passed = [
            r.sequence.order
            for r in waiting
            if before[r.sequence.key] is not running and r.sequence.status is not running
            if r.sequence.key not in held
        ]
        assert not passed or all(sequence.order < min(passed) for sequence in started)
        for victim in plan.preempted:
            assert before[victim.key] is running
            assert (victim.status, victim.block_table, victim.row) == (SequenceStatus.PREEMPTED, [], -1)
            self.live[victim.key].computed = 0
            self.counts["preempted in flight"] += self._flies(victim)
            if started:
                assert len(started) == 1
                assert victim.params.priority > started[0].params.priority
                assert victim.order > started[0].order
                self.counts["gives way to an urgent one"] += 1
            else:
                assert all(victim.order > sequence.order for sequence in stay)
                self.counts["preempted for blocks"] += 1

    def _check_shape(self, plan: StepPlan) -> None:
        config, size, chunks, rows = self.setup.config, self.setup.block_size, plan.prefills, plan.decodes
        assert 1 <= plan.num_tokens <= config.max_num_batched_tokens
        assert len(chunks) <= config.max_prefill_seqs
        running = [s for r in self.live.values() if (s := r.sequence).status is SequenceStatus.RUNNING]
        assert len({s.row for s in running}) == len(running) <= config.max_num_seqs
        assert all(0 <= s.row < config.max_num_seqs for s in running)
        planned = list(plan.sequences())
        assert len({s.key for s in planned}) == len(planned)
        assert all(s.status is SequenceStatus.RUNNING for s in planned)
        assert (plan.bucket_prefill is None, plan.bucket_decode is None) == (not chunks, not rows)
        if plan.bucket_prefill is not None:
            query = max(chunk.length for chunk in chunks)
            context = max(-(-chunk.start // size) for chunk in chunks)
            assert plan.bucket_prefill.covers(len(chunks), query, context)
            assert plan.bucket_prefill.batch * plan.bucket_prefill.query <= config.max_num_batched_tokens
        if plan.bucket_decode is not None:
            tables = [row.sequence.block_table for row in rows]
            assert all(len(row.sequence.block_table) == row.position // size + 1 for row in rows)
            highest, total = max(map(max, tables)) + 1, sum(map(len, tables))
            assert plan.bucket_decode.covers(len(rows), 1, highest if config.contiguous else total)
            self.counts["more blocks than the pool"] += total > self.pool.total
        if config.contiguous:
            assert len(plan.moves) <= config.max_block_moves
            self.counts["moves"] += len(plan.moves)
        else:
            assert len(plan.moves) == len(plan.moved) <= config.max_num_seqs
            assert all(move.tokens for move in plan.moves)
            self.counts["copies"] += len(plan.moves)
        self.counts["chunks and decodes"] += bool(chunks and rows)
        self.counts["prefill batches"] += len(chunks) > 1
        self.counts["steps"] += 1

    def _check_positions(self, plan: StepPlan, before: dict[int, SequenceStatus]) -> None:
        """Each sequence goes on where the plans before left it; a step that starts it may find a prefix."""
        chunks = {chunk.sequence.key for chunk in plan.prefills}
        for sequence in self._started(before):
            if sequence.key not in chunks:
                reference = self.live[sequence.key]
                self._check_start(reference, reference.length - 1, before[sequence.key])
                reference.computed, reference.idle_decodes = reference.length - 1, 0
                self.counts["starts as a decode"] += 1
        for chunk in plan.prefills:
            reference, status = self.live[chunk.sequence.key], before[chunk.sequence.key]
            if status is not SequenceStatus.RUNNING:
                self._check_start(reference, chunk.start, status)
                reference.computed, reference.idle_prefills = chunk.start, 0
            assert chunk.start == reference.computed
            reference.computed = chunk.end
            assert chunk.samples == (chunk.end == reference.length)
            reference.length += chunk.samples
            self.counts["chunks that do not end a prompt"] += not chunk.samples
        for row in plan.decodes:
            reference = self.live[row.sequence.key]
            assert row.position == reference.computed == reference.length - 1
            known = row.sequence.token_ids
            assert row.token == (known[row.position] if row.position < len(known) else None)
            self.counts["tokens in flight"] += row.token is None
            reference.computed += 1
            reference.length += 1
            assert reference.length <= row.sequence.longest

    def _check_start(self, reference: Reference, start: int, status: SequenceStatus) -> None:
        sequence, size = reference.sequence, self.setup.block_size
        assert reference.length == len(sequence.token_ids)
        assert start < reference.length
        shared = start == min(sequence.prompt_len, reference.length - 1)
        assert start % size == 0 or shared
        if sequence.params.sampling.prompt_logprobs >= 0:
            assert start == 0
        elif not self.setup.prefix_caching:
            assert start == 0 or shared
        if status is SequenceStatus.WAITING:
            hit = start // size * size if self.setup.prefix_caching else 0
            assert sequence.num_cached_tokens == min(hit, sequence.prompt_len)
        self.counts[f"{status.value} to running"] += 1
        self.counts[f"hits of {status.value}"] += start > 0
        self.counts["all but one block hit"] += start > 0 and start + size >= reference.length

    def _check_progress(self, plan: StepPlan, started: list[Sequence]) -> None:
        """All decode in every step unless a split makes them take turns, and so do started prompts."""
        config, split = self.setup.config, False
        served = {sequence.key for sequence in (*plan.sequences(), *started)}
        ageing = (max(self.setup.priorities) - min(self.setup.priorities)) * config.priority_ageing_steps
        for key, reference in self.live.items():
            runs = reference.sequence.status is SequenceStatus.RUNNING
            ends = reference.length >= reference.sequence.longest
            if key in served or not runs or ends:
                reference.idle_decodes = reference.idle_prefills = 0
            elif self._prefills(reference):
                reference.idle_prefills += 1
                assert reference.idle_prefills <= ageing + config.max_num_seqs
            else:
                split = True
                reference.idle_decodes += 1
                assert reference.idle_decodes < config.max_num_seqs
        assert not split or self.setup.decode_maxima is not None
        self.counts["splits"] += split

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
            self._ended(reference, status)

    def _ended(self, reference: Reference, status: SequenceStatus) -> None:
        sequence = reference.sequence
        assert (sequence.status, sequence.block_table, sequence.row) == (SequenceStatus.FINISHED, [], -1)
        self.counts[f"{status.value} to finished"] += 1
        self.counts["ends with a step in flight"] += self._flies(sequence)
        del self.live[sequence.key]

    def _started(self, before: dict[int, SequenceStatus]) -> list[Sequence]:
        """What a plan has given blocks."""
        running = SequenceStatus.RUNNING
        return [
            s
            for r in self.live.values()
            if before[(s := r.sequence).key] is not running and s.status is running
        ]

    def _growing(self) -> int:
        """Sequences whose next token needs a block."""
        return sum(
            reference.length - reference.computed == 1
            and reference.length < reference.sequence.longest
            and reference.computed == len(reference.sequence.block_table) * self.setup.block_size
            for reference in self.live.values()
            if reference.sequence.status is SequenceStatus.RUNNING
        )

    def _prefills(self, reference: Reference) -> bool:
        return reference.length - reference.computed > 1

    def _flies(self, sequence: Sequence) -> bool:
        return any(planned is sequence for plan, _ in self.in_flight for planned in plan.sequences())
