"""Decides what each step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from services.engine.bucketing import Bucket, BucketPlan
from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler.beams import BeamGroup, Beams
from services.engine.scheduler.decodes import DecodeChoice, book_decodes, choose_decodes
from services.engine.scheduler.defragmentation import move_blocks
from services.engine.scheduler.errors import SchedulerError
from services.engine.scheduler.kept import KeptBlocks
from services.engine.scheduler.load import StartCounts
from services.engine.scheduler.plan import StepPlan
from services.engine.scheduler.prefills import PrefillBatch
from services.engine.scheduler.prefixes import Demand, demand_of, take_blocks
from services.engine.scheduler.running import RunningSet
from services.engine.scheduler.sequence import Sequence, SequenceStatus
from services.engine.scheduler.settings import SchedulerConfig
from services.engine.scheduler.sharing import SharedPrompts
from services.engine.scheduler.victims import choose_victims, reserved_blocks
from services.engine.scheduler.waiting import WaitingQueue


class Planner:
    """Moves sequences between the waiting and the running and gives them blocks, one step at a time.

    All decode in every step, as far as the buckets hold them, and beside them runs one prefill forward: so a
    decode never waits for more than one chunk. Started prompts take turns by the step of their last chunk.
    Those not started yet take turns with them as if they were one prompt, its last chunk being the one that
    started a prompt last: many short prompts get ahead while a long one is computed, and none of its chunks
    waits for more than one step of theirs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        buckets: BucketPlan,
        waiting: WaitingQueue,
        running: RunningSet,
        shared: SharedPrompts,
        beams: Beams,
        kept: KeptBlocks,
    ) -> None:
        self._config = config
        self._pool = pool
        self._buckets = buckets
        self._waiting = waiting
        self._running = running
        self._shared = shared
        self._beams = beams
        self._kept = kept
        # What the step in the making copies, and for whom.
        self._copies: list[BlockMove] = []
        self._copied: list[Sequence] = []
        # Those that it starts whose prompt was there: nothing is left of them to prefill.
        self._begun: list[Sequence] = []
        self._step = 0
        self._last_start = 0
        self.counts = StartCounts()
        self.gave_way = False
        """The last call of `plan` made no step but took blocks, maybe of somebody with a step in flight."""

    @property
    def step(self) -> int:
        """Steps planned so far: the clock of priorities and turns."""
        return self._step

    def plan(self) -> StepPlan | None:
        """The next step. None if there is nothing to compute before a step in flight is committed."""
        self._step += 1
        self._copies, self._copied, self._begun = [], [], []
        preempted: list[Sequence] = []
        made = self._make(preempted)
        self.gave_way = made is None and bool(preempted)
        return made

    def _make(self, preempted: list[Sequence]) -> StepPlan | None:
        choice = self._choose_decodes(preempted)
        if choice is None:
            return None
        decoding = choice.sequences
        for sequence in choice.growing:
            self._grow(sequence, self._pool.allocate(1)[0])
        urgent = None if preempted else self._make_way(preempted)
        if urgent is not None:
            decoding = [s for s in decoding if s.status is SequenceStatus.RUNNING]
        split, blocks = choice.split, self._blocks_of(decoding, split=choice.split)
        budget = self._config.prompt_budget(len(decoding))
        prefill = PrefillBatch(self._buckets, budget, self._config.max_prefill_seqs)
        # What was short of blocks a moment ago starts nothing new.
        self._fill(prefill, urgent, admit=urgent is not None or not preempted)
        if self._begun and not decoding and not prefill.chunks:
            # What starts to decode beside a step is not in it, but this one would do nothing else.
            choice = choose_decodes(self._running, self._buckets, contiguous=self._config.contiguous)
            decoding, split = choice.sequences, choice.split
            blocks = self._blocks_of(decoding, split=split)
        if not decoding and not prefill.chunks:
            return None
        if split:
            for sequence in decoding:
                sequence.last_decode_step = self._step
        moves, moved = tuple(self._copies), tuple(self._copied)
        if self._config.contiguous:
            moves, moved = move_blocks(self._running, self._pool, self._config.max_block_moves)
        decodes = book_decodes(decoding, self._running, self._pool.block_size)
        if self._running.resting:
            for sequence in decoding:
                self._follow_trunk(sequence)
        return StepPlan(
            prefills=tuple(prefill.chunks),
            decodes=decodes,
            preempted=tuple(preempted),
            bucket_prefill=prefill.bucket,
            bucket_decode=self._decode_bucket(decoding, blocks) if decoding else None,
            moves=moves,
            moved=moved,
        )

    def preempt(self, victim: Sequence) -> list[Sequence]:
        """Takes a running sequence's blocks; it waits again. Its token that is in flight still counts.

        A group of beams gives way as a whole. Returns who has given way.
        """
        if victim.group is not None:
            members = self._beams.preempt(victim.group)
            self.counts.preemptions += len(members)
            return members
        self.counts.preemptions += 1
        self._running.remove(victim)
        self._pool.free(victim.preempt())
        self._waiting.push(victim)
        return [victim]

    def _grow(self, sequence: Sequence, block: int) -> None:
        if not sequence.shares_last:
            self._running.grow(sequence, block)
            return
        shared = self._running.own(sequence, block)
        self._copies.append(BlockMove(shared, block, sequence.num_computed_tokens % self._pool.block_size))
        self._copied.append(sequence)
        self._pool.free([shared])

    def _choose_decodes(self, preempted: list[Sequence]) -> DecodeChoice | None:
        """Picks who decodes, and preempts, last in order first, until the blocks for that are free.

        None if they are not and the step in flight is known to end sequences: their blocks are worth waiting
        for. After preemptions the choice is made anew, for a split batch has others then.
        """
        while True:
            choice = choose_decodes(self._running, self._buckets, contiguous=self._config.contiguous)
            if len(choice.growing) <= self._pool.free_count:
                return choice
            if self._give_up_blocks():
                continue
            if self._running.ending:
                return None
            growing = {sequence.key for sequence in choice.growing}
            while len(growing) > self._pool.free_count:
                if self._give_up_blocks():
                    continue
                victim = self._running.by_order.last()
                if victim is None:
                    raise SchedulerError("sequences grow and none runs")
                gone = self.preempt(victim)
                preempted += gone
                growing.difference_update(one.key for one in gone)

    def _make_way(self, preempted: list[Sequence]) -> Sequence | None:
        """Preempts for the first that waits if it is more urgent and that lets it run; returns it then."""
        head = self._waiting.head()
        if head is None or self._running.ending:
            return None
        last = self._running.by_order.last()
        if last is None or last.order < head.order or self._demand(head) is not None:
            return None
        victims = choose_victims(head, self._demand_of(head), self._running, self._pool)
        for victim in victims:
            if victim.status is SequenceStatus.RUNNING:
                preempted += self.preempt(victim)
        return head if victims else None

    def _decode_bucket(self, decoding: list[Sequence], blocks: int) -> Bucket:
        if self._config.contiguous:
            blocks = max(sequence.highest_block for sequence in decoding) + 1
        bucket = self._buckets.decode_bucket(len(decoding), blocks)
        if bucket is None:
            raise SchedulerError(f"no decode bucket covers {len(decoding)} rows with {blocks} blocks")
        return bucket

    def _fill(self, batch: PrefillBatch, urgent: Sequence | None, *, admit: bool) -> None:
        """Adds chunks by turns. Who made others give way comes first, lest they have done so for nothing."""
        started = deque(self._running.prefilling.first(self._config.max_prefill_seqs))
        first = self._waiting.head() if admit else None
        last_start = self._last_start
        while not batch.full and (first is not None or started):
            if first is not None and (
                first is urgent or not started or self._start_turn(first, last_start) <= started[0].turn[0]
            ):
                begun = self._start(first, batch)
                # A victim of this very step may be the next, and what is in flight for it is of its old life.
                # When the step after this one is planned, that is committed (see `gave_way`).
                first = self._waiting.head() if begun and urgent is None else None
            elif not self._go_on(started.popleft(), batch):
                # No bucket holds one more row of this length, so none holds the others.
                started.clear()

    def _demand(self, sequence: Sequence) -> Demand | None:
        """The blocks of a waiting sequence, for all its tokens, so that its prompt need not be preempted.

        None if it cannot run now: no row or too few blocks are free.
        """
        reserved, free = reserved_blocks(len(self._running)), self._pool.free_count
        # At least its last block is not cached. To know that suffices while the pool is full.
        if not self._running.free_rows or free <= reserved:
            return None
        demand = self._demand_of(sequence)
        fits = demand.allocated + reserved <= free - demand.idle and demand.rows <= self._running.free_rows
        return demand if fits else None

    def _demand_of(self, sequence: Sequence) -> Demand:
        group = sequence.group
        if group is None:
            return demand_of(sequence, self._pool, self._shared.found(sequence))
        demand = demand_of(group.trunk, self._pool, None)
        return replace(demand, rows=len(group.members), beside=self._beams.missing(group))

    def _start(self, sequence: Sequence, batch: PrefillBatch) -> bool:
        demand = self._demand(sequence)
        while demand is None and not self._running and self._give_up_blocks():
            demand = self._demand(sequence)
        if demand is None:
            return False
        if sequence.group is not None:
            return self._start_beams(sequence.group, demand, batch)
        end = start = demand.start
        if not demand.shared or start + 1 < len(sequence.token_ids):
            chunk = batch.add(sequence, start)
            if chunk is None:
                return False
            end = chunk.end
        self._waiting.pop(sequence)
        table, copies = take_blocks(sequence, demand, self._pool)
        self.counts.started(sequence)
        sequence.run(table, start)
        self._running.add(sequence, end, self._turn(sequence))
        self._shared.started(sequence)
        if copies:
            self._copies += copies
            self._copied.append(sequence)
        if end == start:
            self._begun.append(sequence)
        self._last_start = self._step
        return True

    def _give_up_blocks(self) -> bool:
        """Frees blocks that nobody runs with, if there are any."""
        return self._shared.give_up() or self._kept.give_up()

    def _start_beams(self, group: BeamGroup, demand: Demand, batch: PrefillBatch) -> bool:
        trunk = group.trunk
        chunk = batch.add(trunk, demand.start)
        if chunk is None:
            return False
        self._waiting.pop(group.lead)
        table, _ = take_blocks(trunk, demand, self._pool)
        self.counts.started(trunk)
        trunk.run(table, demand.start)
        self._running.add(trunk, chunk.end, self._turn(trunk))
        self._beams.start(group)
        self._last_start = self._step
        if chunk.samples:
            self._follow_trunk(trunk)
        return True

    def _go_on(self, sequence: Sequence, batch: PrefillBatch) -> bool:
        chunk = batch.add(sequence, sequence.num_computed_tokens)
        if chunk is None:
            return False
        self._running.go_on(sequence, chunk.end, self._turn(sequence))
        if chunk.samples:
            self._follow_trunk(sequence)
        return True

    def _follow_trunk(self, sequence: Sequence) -> None:
        """Lets other beams go on if the last token of a group's trunk is planned."""
        if sequence.group is not None and sequence is sequence.group.trunk:
            self._beams.go_on(sequence.group, self._turn(sequence)[0])

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        aged = sequence.params.priority * self._config.priority_ageing_steps + self._step
        return aged, sequence.order[1]

    def _start_turn(self, sequence: Sequence, last_start: int) -> int:
        aged = sequence.params.priority * self._config.priority_ageing_steps + last_start
        return max(aged, sequence.order[0])

    def _blocks_of(self, decoding: list[Sequence], *, split: bool) -> int:
        """Blocks of those that decode: of all that can, unless a batch was split."""
        if not split:
            return self._running.decode_blocks
        return sum(len(sequence.block_table) for sequence in decoding)
