"""What must hold of every plan of a scheduler, whatever happens to it."""

from __future__ import annotations

from collections import Counter, deque

from services.engine.kv import BlockPool
from services.engine.scheduler import Scheduler, Sequence, SequenceStatus, StepPlan
from tests.support.simulated_engine import Reference, Setup, SimulatedDevice


class PlanChecks:
    """Compares plans with the reference of each live sequence. `counts` says how often what happened."""

    setup: Setup
    counts: Counter[str]
    pool: BlockPool
    scheduler: Scheduler
    device: SimulatedDevice
    live: dict[int, Reference]
    most_blocks: int
    in_flight: deque[tuple[StepPlan, dict[int, int]]]

    def _check_victims(self, plan: StepPlan, before: dict[int, SequenceStatus]) -> None:
        """Check that the last in order are preempted, or less urgent ones for one that starts."""
        running, waiting, held = SequenceStatus.RUNNING, self.live.values(), self._held()
        started = self._started(before)
        stay = [
            r.sequence for r in waiting if before[r.sequence.key] is running and r.sequence.status is running
        ]
        passed = [
            r.sequence.order
            for r in waiting
            if before[r.sequence.key] is not running and r.sequence.status is not running
            if r.sequence.key not in held and self._members(r.sequence)[0] is r.sequence
        ]
        assert not passed or all(sequence.order < min(passed) for sequence in started)
        for victim in plan.preempted:
            assert before[victim.key] is running
            assert (victim.status, victim.block_table, victim.row) == (SequenceStatus.PREEMPTED, [], -1)
            self.live[victim.key].computed = 0
            self.counts["preempted in flight"] += self._flies(victim)
            if started:
                assert len({self._members(sequence)[0].key for sequence in started}) == 1
                assert victim.params.priority > started[0].params.priority
                assert victim.order > started[0].order
                self.counts["preempted for an urgent one"] += 1
            else:
                assert all(victim.order > sequence.order for sequence in stay)
                self.counts["preempted for blocks"] += 1

    def _check_shape(self, plan: StepPlan) -> None:
        config, size, chunks, rows = self.setup.config, self.setup.block_size, plan.prefills, plan.decodes
        assert 1 <= plan.num_tokens <= config.prompt_budget(len(rows)) + len(rows)
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
            assert plan.bucket_prefill.batch * plan.bucket_prefill.query <= config.prompt_budget(0)
            self.counts["more while nothing decodes"] += plan.num_tokens > config.max_num_batched_tokens
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
            reference = self.live[sequence.key]
            if sequence.group is not None and sequence is not sequence.group.trunk:
                reference.computed, reference.idle_prefills = sequence.num_computed_tokens, 0
                assert reference.computed % self.setup.block_size == 0
                self.counts["beams that start beside their trunk"] += sequence in sequence.group.active
            elif sequence.key not in chunks:
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
            reference.length += chunk.samples and chunk.sequence.group is None
            self.counts["chunks that do not end a prompt"] += not chunk.samples
        for row in plan.decodes:
            reference = self.live[row.sequence.key]
            assert row.position == reference.computed == reference.length - 1
            known = row.sequence.token_ids
            assert row.token == (known[row.position] if row.position < len(known) else None)
            self.counts["tokens in flight"] += row.token is None
            reference.computed += 1
            reference.length += row.sequence.group is None
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

    def _check_progress(self, plan: StepPlan, new: set[int]) -> None:
        """All decode in every step unless a split makes them take turns, and so do started prompts.

        `new`: what had nothing to compute when the step was planned.
        """
        config, split, left_out = self.setup.config, False, 0
        served = new.union(sequence.key for sequence in plan.sequences())
        ageing = (max(self.setup.priorities) - min(self.setup.priorities)) * config.priority_ageing_steps
        for key, reference in self.live.items():
            runs = reference.sequence.status is SequenceStatus.RUNNING
            rests = key in self.scheduler.running.resting
            ends = reference.length >= reference.sequence.longest
            if key in served or not runs or ends or rests:
                reference.idle_decodes = reference.idle_prefills = 0
            elif self._prefills(reference):
                reference.idle_prefills += 1
                assert reference.idle_prefills <= ageing + config.max_num_seqs
            else:
                split = True
                left_out += reference.length // self.setup.block_size + 1
                reference.idle_decodes += 1
                assert reference.idle_decodes < config.max_num_seqs
        # Blocks count for each that shares them: without `decode_maxima` too they may be too many.
        blocks = left_out + sum(len(row.sequence.block_table) for row in plan.decodes)
        assert not split or self.setup.decode_maxima is not None or blocks > self.most_blocks
        self.counts["splits"] += split

    def _started(self, before: dict[int, SequenceStatus]) -> list[Sequence]:
        """What a plan has given blocks."""
        running = SequenceStatus.RUNNING
        return [
            s
            for r in self.live.values()
            if before[(s := r.sequence).key] is not running and s.status is running
        ]

    def _held(self) -> set[int]:
        """Keys of what waits for another's prompt."""
        return {sequence.key for sequence in self.scheduler.shared.held()}

    def _kept(self) -> list[int]:
        """Blocks of shared prompts; a prompt has each once."""
        return [block for table in self.scheduler.shared.tables() for block in table]

    def _members(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that end and are preempted together with this one."""
        return [sequence] if sequence.group is None else sequence.group.members

    def _growing(self) -> int:
        """Sequences whose next token needs a block."""
        return sum(
            reference.length - reference.computed == 1
            and reference.length < reference.sequence.longest
            and (
                reference.computed == len(reference.sequence.block_table) * self.setup.block_size
                or reference.sequence.shares_last
            )
            for reference in self.live.values()
            if reference.sequence.status is SequenceStatus.RUNNING
        )

    def _prefills(self, reference: Reference) -> bool:
        return reference.length - reference.computed > 1

    def _flies(self, sequence: Sequence) -> bool:
        return any(planned is sequence for plan, _ in self.in_flight for planned in plan.sequences())
