"""Continuous batching: prefill chunks beside decodes under one token budget, preemption by recompute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.engine.bucketing import BucketPlan
from services.engine.kv import BlockPool
from services.engine.link import FinishReason
from services.engine.scheduler.admission import check_admissible
from services.engine.scheduler.batches import PrefillBatch, decode_rows, pick_decodes
from services.engine.scheduler.errors import QueueFull, SchedulerError
from services.engine.scheduler.load import SchedulerLoad
from services.engine.scheduler.plan import Advanced, Finished, Outcome, StepPlan
from services.engine.scheduler.sequence import Sequence, SequenceStatus
from services.engine.scheduler.settings import SchedulerConfig
from services.engine.scheduler.stopping import finish_reason
from services.engine.scheduler.waiting import WaitingQueue

# A sequence is admitted only if one block stays free for each so many that run: they grow, and without a
# reserve the newcomer would be preempted as soon as its prompt is computed.
_RUNNING_PER_RESERVED_BLOCK: Final = 8


class Scheduler:
    """Owns every live sequence. Drive it as: plan, run the plan, commit it with the sampled tokens; again.

    Sequences are served by age. The running ones are therefore always older than the waiting ones, and the
    newest running one is the one that gives way when blocks run out. A sequence may be ended between any two
    calls.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, buckets: BucketPlan) -> None:
        _check_buckets(config, pool, buckets)
        self._config = config
        self._pool = pool
        self._buckets = buckets
        self._waiting = WaitingQueue()
        # By age: the newest is last.
        self._running: dict[int, Sequence] = {}
        self._live: dict[int, Sequence] = {}
        self._arrivals = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence lives."""
        return bool(self._live)

    def load(self) -> SchedulerLoad:
        """The load now."""
        rests = (sequence.num_uncomputed_tokens for sequence in self._running.values())
        return SchedulerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self._pool.used,
            pending_prefill_tokens=self._waiting.tokens + sum(rest for rest in rests if rest > 1),
        )

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises SequenceRefused for one that can never run, QueueFull if too many live, SchedulerError for a
        key that is in use.
        """
        if sequence.key in self._live:
            raise SchedulerError(f"sequence {sequence.key} is already live")
        check_admissible(sequence, self._config, self._pool)
        if len(self._live) >= self._config.max_num_seqs + self._config.max_waiting:
            raise QueueFull("max_waiting", self._config.max_waiting)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._live[sequence.key] = sequence
        self._waiting.append(sequence)

    def abort(self, key: int) -> bool:
        """Ends a sequence wherever it is and frees its blocks. False if it is not live."""
        return self.end(key, FinishReason.ABORT) is not None

    def end(self, key: int, reason: FinishReason) -> Finished | None:
        """Ends a sequence from outside, between any two calls, for this reason. None if it is not live."""
        sequence = self._live.get(key)
        if sequence is None:
            return None
        self._retire(sequence)
        return Finished(sequence, None, reason)

    def plan(self) -> StepPlan | None:
        """Decides the next step and allocates its blocks. None if no sequence lives."""
        self._steps += 1
        decoding, preempted = self._plan_decodes()
        budget = self._config.max_num_batched_tokens - len(decoding)
        prefill = PrefillBatch(self._buckets, budget, self._config.max_prefill_seqs)
        self._fill(prefill, admit=not preempted)
        if not decoding and not prefill.chunks:
            if self._live:
                raise SchedulerError("sequences are live and none can be computed")
            return None
        blocks = sum(len(sequence.block_table) for sequence in decoding)
        decode_bucket = self._buckets.decode_bucket(len(decoding), blocks) if decoding else None
        if decoding and decode_bucket is None:
            raise SchedulerError(f"no decode bucket covers {len(decoding)} rows with {blocks} blocks")
        return StepPlan(
            prefills=tuple(prefill.chunks),
            decodes=decode_rows(decoding),
            preempted=tuple(preempted),
            bucket_prefill=prefill.bucket,
            bucket_decode=decode_bucket,
        )

    def commit(self, plan: StepPlan, sampled: Mapping[int, int]) -> list[Outcome]:
        """Books a step that was run. `sampled` maps the keys of `plan.sampling()` to their new token ids.

        Returns what came of each sampling sequence, in the plan's order. A sequence that was ended meanwhile
        is left out, and its token may be missing. Raises SchedulerError for a plan that is not the last one,
        or a missing token.
        """
        outcomes: list[Outcome] = []
        for chunk in plan.prefills:
            if self._advance(chunk.sequence, chunk.start, chunk.end) and chunk.samples:
                outcomes.append(self._take(chunk.sequence, sampled))
        for row in plan.decodes:
            if self._advance(row.sequence, row.position, row.position + 1):
                outcomes.append(self._take(row.sequence, sampled))
        return outcomes

    def check(self) -> None:
        """Compares all books, for idle moments and tests. Raises BlockError or SchedulerError."""
        self._pool.check([sequence.block_table for sequence in self._live.values()])
        if len(self._live) != len(self._running) + len(self._waiting):
            raise SchedulerError("the live sequences are not the running and the waiting ones")
        for sequence in self._running.values():
            if sequence.status is not SequenceStatus.RUNNING:
                raise SchedulerError(f"sequence {sequence.key} runs and is {sequence.status.value}")

    def _plan_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """Picks who decodes and gives each the block of its token; returns them and the preempted.

        After a preemption the choice is made anew: the victim may have been picked, and a split batch has
        others.
        """
        preempted: list[Sequence] = []
        while True:
            candidates = [s for s in self._running.values() if s.num_uncomputed_tokens == 1]
            decoding = pick_decodes(candidates, self._buckets, self._pool)
            growing = [s for s in decoding if self._pool.blocks_for(len(s.token_ids)) > len(s.block_table)]
            if len(growing) <= self._pool.free_count:
                break
            preempted.append(self._preempt_newest())
        for sequence in growing:
            sequence.block_table += self._pool.allocate(1)
        for sequence in decoding:
            sequence.last_decode_step = self._steps
        return decoding, preempted

    def _preempt_newest(self) -> Sequence:
        _, victim = self._running.popitem()
        self._pool.free(victim.preempt())
        self._waiting.push_front(victim)
        return victim

    def _fill(self, prefill: PrefillBatch, *, admit: bool) -> None:
        """Goes on with started prompts, then starts the next ones if there is room for the whole of them."""
        for sequence in self._running.values():
            if prefill.full:
                return
            if sequence.num_uncomputed_tokens > 1:
                prefill.add(sequence)
        while admit and len(self._running) < self._config.max_num_seqs:
            head = self._waiting.head()
            if head is None or not self._has_room_for(head) or not prefill.add(head):
                return
            self._waiting.remove(head)
            self._running[head.key] = head
            head.run(self._pool.allocate(self._pool.blocks_for(len(head.token_ids))))

    def _has_room_for(self, sequence: Sequence) -> bool:
        reserve = -(-len(self._running) // _RUNNING_PER_RESERVED_BLOCK)
        return self._pool.blocks_for(len(sequence.token_ids)) + reserve <= self._pool.free_count

    def _advance(self, sequence: Sequence, start: int, end: int) -> bool:
        if sequence.finished:
            return False
        if sequence.num_computed_tokens != start:
            raise SchedulerError(f"sequence {sequence.key} is not where the committed plan found it")
        sequence.num_computed_tokens = end
        return True

    def _take(self, sequence: Sequence, sampled: Mapping[int, int]) -> Outcome:
        token = sampled.get(sequence.key)
        if token is None:
            raise SchedulerError(f"no token was sampled for sequence {sequence.key}")
        sequence.token_ids.append(token)
        reason = finish_reason(sequence, self._config.max_model_len)
        if reason is None:
            return Advanced(sequence, token)
        self._retire(sequence)
        return Finished(sequence, token, reason, token if reason is FinishReason.STOP else None)

    def _retire(self, sequence: Sequence) -> None:
        del self._live[sequence.key]
        if sequence.status is SequenceStatus.RUNNING:
            del self._running[sequence.key]
        else:
            self._waiting.remove(sequence)
        self._pool.free(sequence.finish())


def _check_buckets(config: SchedulerConfig, pool: BlockPool, buckets: BucketPlan) -> None:
    """Raises ValueError for buckets that do not reach what a step can hold."""
    query = min(config.max_num_batched_tokens, config.max_model_len - 1)
    context = pool.blocks_for(config.max_model_len - 2)
    longest = min(pool.total, pool.blocks_for(config.max_model_len - 1))
    if buckets.block_size != pool.block_size:
        raise ValueError(
            f"buckets expect blocks of {buckets.block_size} tokens, the pool has {pool.block_size}"
        )
    if buckets.prefill_bucket(1, query, context) is None:
        raise ValueError(f"no prefill bucket covers {query} tokens after {context} blocks")
    if buckets.decode_bucket(1, longest) is None:
        raise ValueError(f"no decode bucket covers a sequence of {longest} blocks")
