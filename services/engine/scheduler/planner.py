"""Plan each step: decoding sequences, chunks of prompts to prefill, sequences to preempt."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter
from typing import Final

from services.engine.bucketing import Bucket, BucketPlan
from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler.beams import Beams
from services.engine.scheduler.queues import RunningSet, WaitingQueue
from services.engine.scheduler.reuse import Demand, SharedPrompts, TransferBlocks, demand_of, take_blocks
from services.engine.scheduler.sequence import (
    BeamGroup,
    DecodeRow,
    PrefillChunk,
    SchedulerError,
    Sequence,
    SequenceStatus,
    StartCounts,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler, each named as the engine option that sets it.

    `max_num_seqs` sequences run at once and `max_waiting` more may wait. A step computes up to
    `max_num_batched_tokens` tokens, or `max_idle_batched_tokens` if nothing decodes in it (None: no more then
    either), of up to `max_prefill_seqs` sequences in its prefill forward. A sequence holds up to
    `max_model_len` tokens, prompt and completion together.

    `contiguous`: decode fetches the pool's blocks as one slice up to the batch's highest id. What runs is
    kept near the start of the pool by up to `max_block_moves` moves in a step.

    A lower priority is more urgent, and one level of it weighs as much as `priority_ageing_steps` steps of
    waiting. All that wait age alike, so the key by which they are compared never changes: priority times
    ageing steps, plus the step at which the waiting began. The `order` of sequences counts from their
    arrival: it decides which one runs next and, from the other end, which one is preempted when blocks run
    out. The first in that order is therefore never preempted, later arrivals cannot stay before it, and no
    sequence starves. The `turn` of a started prompt counts from its last chunk: it decides which prompt
    computes the next one.
    """

    max_model_len: int
    max_num_seqs: int = 32
    max_waiting: int = 256
    max_num_batched_tokens: int = 512
    max_prefill_seqs: int = 1
    priority_ageing_steps: int = 256
    contiguous: bool = False
    max_block_moves: int = 32
    max_idle_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_seqs",
            "priority_ageing_steps",
            "max_block_moves",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, not {self.max_waiting}")
        if self.prompt_budget(0) < self.max_num_batched_tokens:
            raise ValueError(
                f"max_idle_batched_tokens ({self.max_idle_batched_tokens}) must be at least "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )

    def prompt_budget(self, decoding: int) -> int:
        """Return the tokens of prompts in a step in which so many sequences decode."""
        if decoding or self.max_idle_batched_tokens is None:
            return self.max_num_batched_tokens - decoding
        return self.max_idle_batched_tokens


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Sequences that decode, and those of them that need one more block. `split`: others have to wait."""

    sequences: list[Sequence]
    growing: list[Sequence]
    split: bool


def choose_decodes(running: RunningSet, buckets: BucketPlan, *, contiguous: bool) -> DecodeChoice:
    """Choose all decoding sequences if the largest bucket holds them, else those served longest ago.

    Sequences that are left out come first next time: a batch that exceeds the buckets is split over steps.
    The sum of blocks can exceed them even if all fit the pool: a shared one counts for each that shares it.
    In a contiguous cache the sum does not matter.
    """
    blocks = running.decode_blocks + len(running.growing)
    max_blocks = buckets.max_decode_blocks if not contiguous else sys.maxsize
    if len(running.decoding) <= buckets.max_decode_batch and blocks <= max_blocks:
        return DecodeChoice(list(running.decoding.values()), list(running.growing.values()), split=False)
    chosen: list[Sequence] = []
    total = 0
    for sequence in sorted(running.decoding.values(), key=attrgetter("last_decode_step")):
        if len(chosen) == buckets.max_decode_batch:
            break
        more = sequence.key in running.growing and not sequence.shares_last
        blocks = len(sequence.block_table) + more
        if total + blocks <= max_blocks:
            chosen.append(sequence)
            total += blocks
    growing = [sequence for sequence in chosen if sequence.key in running.growing]
    return DecodeChoice(chosen, growing, split=True)


def book_decodes(
    sequences: Iterable[Sequence], running: RunningSet, block_size: int
) -> tuple[DecodeRow, ...]:
    """Book the computation of each sequence's last token and the token to come. Return the rows."""
    rows: list[DecodeRow] = []
    for sequence in sequences:
        position = sequence.num_computed_tokens
        token = None if sequence.num_pending else sequence.token_ids[position]
        following = position + 1
        rows.append(DecodeRow(sequence, position, following < sequence.shortest, token))
        sequence.num_computed_tokens = following
        sequence.num_pending += 1
        if sequence.group is not None:
            running.rest(sequence)
        elif following + 1 >= sequence.longest:
            running.end(sequence)
        elif not following % block_size:
            running.growing[sequence.key] = sequence
    return tuple(rows)


class PrefillBatch:
    """Chunks of a step's prefill forward: at most `max_seqs` rows and `budget` tokens."""

    def __init__(self, buckets: BucketPlan, budget: int, max_seqs: int) -> None:
        self._buckets = buckets
        self._budget = budget
        self._max_seqs = min(max_seqs, buckets.max_prefill_batch)
        self._query = 0
        self._context = 0
        self.chunks: list[PrefillChunk] = []
        self.bucket: Bucket | None = None

    @property
    def full(self) -> bool:
        """True if no further chunk fits."""
        return self._budget < 1 or len(self.chunks) >= self._max_seqs

    def add(self, sequence: Sequence, start: int) -> PrefillChunk | None:
        """Add a chunk, as long as fits, of a sequence whose first `start` tokens are computed.

        Returns None, adding nothing, if the batch is full or no bucket covers it with that.
        """
        if self.full:
            return None
        length = self._length(sequence, start)
        query = max(self._query, length)
        context = max(self._context, -(-start // self._buckets.block_size))
        bucket = self._buckets.prefill_bucket(len(self.chunks) + 1, query, context)
        if bucket is None:
            return None
        end = start + length
        samples = end == len(sequence.token_ids)
        chunk = PrefillChunk(sequence, start, length, samples, samples and sequence.masks_stops(end))
        self.chunks.append(chunk)
        self.bucket, self._query, self._context = bucket, query, context
        self._budget -= length
        return chunk

    def _length(self, sequence: Sequence, start: int) -> int:
        total = len(sequence.token_ids)
        end = start + min(total - start, self._budget, self._buckets.max_prefill_query)
        # A chunk that is not the last ends with a full block if it can: the next has no partial context.
        aligned = end - end % self._buckets.block_size
        return (aligned if end < total and aligned > start else end) - start


# A sequence is admitted only if one block stays free for each so many that run: they grow, and without a
# reserve the newcomer would be preempted as soon as its prompt is computed.
_RUNNING_PER_RESERVED_BLOCK: Final = 8


def reserved_blocks(running: int) -> int:
    """Return the number of blocks to keep free when a sequence is admitted while so many run."""
    return -(-running // _RUNNING_PER_RESERVED_BLOCK)


def choose_victims(head: Sequence, demand: Demand, running: RunningSet, pool: BlockPool) -> list[Sequence]:
    """Return the fewest sequences to preempt, last in order first, so that `head` gets a row and its blocks.

    They must be less urgent by priority itself: a long wait is no reason to preempt others. And they must
    come after `head` in order, else a stream of urgent arrivals could preempt an aged sequence for ever.
    Empty if they would not free enough blocks: their work would be lost for nothing.
    """
    candidates = [
        sequence
        for sequence in takewhile(lambda sequence: sequence.order > head.order, reversed(running.by_order))
        if sequence.params.priority > head.params.priority
    ]
    free, count = pool.free_count - demand.idle, len(running)
    # Most often this is enough, without a look at the references of every block.
    if demand.allocated > free + sum(len(sequence.block_table) for sequence in candidates):
        return []
    hits, users = set(demand.hits), Counter[int]()
    for number, sequence in enumerate(candidates, 1):
        # A block comes free with its last user, and for nothing else if it is one that `head` hits.
        users.update(sequence.block_table)
        free += sum(
            users[block] == pool.references(block) for block in sequence.block_table if block not in hits
        )
        rows = running.free_rows + number
        if rows >= demand.rows and demand.allocated + reserved_blocks(count - number) <= free:
            return candidates[:number]
    return []


def move_blocks(
    running: RunningSet, pool: BlockPool, limit: int
) -> tuple[tuple[BlockMove, ...], tuple[Sequence, ...]]:
    """Move up to `limit` blocks if that pays, rewrite the tables that name them, and return both.

    It is right to rewrite them while a step is in flight. That step was launched with the old ids, and the
    moves are executed after it and before the forwards of the step that is planned now: they carry along what
    it writes, and everything planned from here on comes after them, also writes to a source block.
    """
    moves = pool.plan_moves(limit)
    if not moves:
        return (), ()
    targets = {move.source: move.target for move in moves}
    lowest = min(targets)
    moved: list[Sequence] = []
    for sequence in running.by_order:
        if sequence.highest_block >= lowest and not targets.keys().isdisjoint(sequence.block_table):
            sequence.set_blocks([targets.get(block, block) for block in sequence.block_table])
            moved.append(sequence)
    return tuple(moves), tuple(moved)


class Planner:
    """Admits and preempts sequences and allocates their blocks, one step at a time.

    All running sequences decode in every step, as far as the buckets hold them, together with one prefill
    forward: so a decode never waits for more than one chunk. Started prompts take turns by the step of their
    last chunk. Prompts not started yet take turns with them as if they were one prompt, its last chunk being
    the one that started a prompt last: many short prompts get ahead while a long one is computed, and none of
    its chunks waits for more than one step of theirs.
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
        transfer_blocks: TransferBlocks,
    ) -> None:
        self._config = config
        self._pool = pool
        self.buckets = buckets
        self._waiting = waiting
        self._running = running
        self._shared = shared
        self._beams = beams
        self._transfer_blocks = transfer_blocks
        # Block copies of the step that is being planned, and their sequences.
        self._copies: list[BlockMove] = []
        self._copied: list[Sequence] = []
        # Sequences that it admits with all of their prompt cached: nothing is left to prefill.
        self._begun: list[Sequence] = []
        self._step = 0
        self._last_start = 0
        self.counts = StartCounts()
        self.preempted_only = False
        """The last call of `plan` made no step but preempted, maybe a sequence with a step in flight."""

    @property
    def step(self) -> int:
        """Steps planned so far: the clock of priorities and turns."""
        return self._step

    def plan(self) -> StepPlan | None:
        """Plan the next step. None if there is nothing to compute before a step in flight is committed."""
        self._step += 1
        self._copies, self._copied, self._begun = [], [], []
        preempted: list[Sequence] = []
        made = self._make(preempted)
        self.preempted_only = made is None and bool(preempted)
        return made

    def _make(self, preempted: list[Sequence]) -> StepPlan | None:
        choice = self._choose_decodes(preempted)
        if choice is None:
            return None
        decoding = choice.sequences
        for sequence in choice.growing:
            self._grow(sequence, self._pool.allocate(1)[0])
        urgent = None if preempted else self._preempt_for_head(preempted)
        if urgent is not None:
            decoding = [s for s in decoding if s.status is SequenceStatus.RUNNING]
        split, blocks = choice.split, self._blocks_of(decoding, split=choice.split)
        budget = self._config.prompt_budget(len(decoding))
        prefill = PrefillBatch(self.buckets, budget, self._config.max_prefill_seqs)
        # Nothing is admitted while blocks are short.
        self._fill(prefill, urgent, admit=urgent is not None or not preempted)
        if self._begun and not decoding and not prefill.chunks:
            # Sequences that start to decode now wait for the next step, unless this one would be empty.
            choice = choose_decodes(self._running, self.buckets, contiguous=self._config.contiguous)
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
        """Preempt a running sequence: free its blocks and queue it again. A token in flight still counts.

        A group of beams is preempted as a whole. Return the preempted sequences.
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
        """Choose the decoding sequences; preempt, last in order first, until their blocks are free.

        None if they are not free and the step in flight is known to end sequences: their blocks are worth
        waiting for. After preemptions the choice is made anew, since a split batch has others then.
        """
        while True:
            choice = choose_decodes(self._running, self.buckets, contiguous=self._config.contiguous)
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

    def _preempt_for_head(self, preempted: list[Sequence]) -> Sequence | None:
        """Preempt for the first waiting sequence if it is more urgent; return it if it can run then."""
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
        bucket = self.buckets.decode_bucket(len(decoding), blocks)
        if bucket is None:
            raise SchedulerError(f"no decode bucket covers {len(decoding)} rows with {blocks} blocks")
        return bucket

    def _fill(self, batch: PrefillBatch, urgent: Sequence | None, *, admit: bool) -> None:
        """Add chunks by turns, `urgent`, for which others were preempted, first."""
        started = deque(self._running.prefilling.first(self._config.max_prefill_seqs))
        first = self._waiting.head() if admit else None
        last_start = self._last_start
        while not batch.full and (first is not None or started):
            if first is not None and (
                first is urgent or not started or self._start_turn(first, last_start) <= started[0].turn[0]
            ):
                begun = self._start(first, batch)
                # The next may have been preempted in this very step, with a token in flight from before. When
                # the step after this one is planned, that token is committed (see `preempted_only`).
                first = self._waiting.head() if begun and urgent is None else None
            elif not self._continue(started.popleft(), batch):
                # No bucket holds one more row of this length, so none holds the others.
                started.clear()

    def _demand(self, sequence: Sequence) -> Demand | None:
        """Return the blocks for all tokens of a waiting sequence, so that its prompt is not preempted.

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
        return replace(demand, rows=len(group.members), beams=self._beams.missing(group))

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
        """Free blocks that no running sequence uses, if there are any."""
        return self._shared.give_up() or self._transfer_blocks.give_up()

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

    def _continue(self, sequence: Sequence, batch: PrefillBatch) -> bool:
        chunk = batch.add(sequence, sequence.num_computed_tokens)
        if chunk is None:
            return False
        self._running.book_chunk(sequence, chunk.end, self._turn(sequence))
        if chunk.samples:
            self._follow_trunk(sequence)
        return True

    def _follow_trunk(self, sequence: Sequence) -> None:
        """Wake the other beams of a group if the last token of its trunk is planned."""
        if sequence.group is not None and sequence is sequence.group.trunk:
            self._beams.wake_others(sequence.group, self._turn(sequence)[0])

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        aged = sequence.params.priority * self._config.priority_ageing_steps + self._step
        return aged, sequence.order[1]

    def _start_turn(self, sequence: Sequence, last_start: int) -> int:
        aged = sequence.params.priority * self._config.priority_ageing_steps + last_start
        return max(aged, sequence.order[0])

    def _blocks_of(self, decoding: list[Sequence], *, split: bool) -> int:
        """Return the blocks of the decoding sequences: of all that can decode, unless a batch was split."""
        if not split:
            return self._running.decode_blocks
        return sum(len(sequence.block_table) for sequence in decoding)
