"""Continuous batching: prefill chunks and decodes under one token budget, preemption by recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from services.engine.bucketing import BucketPlan
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.kv import BlockPool, KvEventLog
from services.engine.scheduler.beams import Beams
from services.engine.scheduler.planner import Planner, SchedulerConfig, reserved_blocks
from services.engine.scheduler.queues import RunningSet, WaitingQueue
from services.engine.scheduler.reuse import (
    IncomingPrefix,
    SharedPrompts,
    TransferBlocks,
    cached_prefix,
    publish_blocks,
    publish_table,
)
from services.engine.scheduler.sequence import (
    Advanced,
    BeamGroup,
    Finished,
    Outcome,
    QueueFull,
    SchedulerError,
    SchedulerLoad,
    Scored,
    Sequence,
    SequenceRefused,
    SequenceStatus,
    StartCounts,
    StepPlan,
    finish_reason,
)


def set_lengths(sequence: Sequence, config: SchedulerConfig) -> None:
    """Set the lengths, prompt and completion, between which a stop id ends the sequence."""
    sequence.shortest = sequence.prompt_len + sequence.params.min_tokens
    sequence.longest = min(config.max_model_len, sequence.prompt_len + sequence.params.max_tokens)


def check_admissible(sequence: Sequence, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raise SequenceRefused for a sequence that is malformed, complete, or can never fit.

    Its lengths must be set. The pool has to hold the sequence at its longest: then the first in order can
    always run to its end, whatever the others hold.
    """
    invalid, too_long = CoreErrorCode.INVALID_ARGUMENT, CoreErrorCode.CONTEXT_LENGTH_EXCEEDED
    length, prompt_len, max_tokens = len(sequence.token_ids), sequence.prompt_len, sequence.params.max_tokens
    generated = sequence.num_generated_tokens
    if not 1 <= prompt_len <= length:
        raise SequenceRefused(invalid, f"prompt_len is {prompt_len} for {length} token ids")
    if max_tokens < 1:
        raise SequenceRefused(invalid, f"max_tokens must be at least 1, not {max_tokens}")
    if generated >= max_tokens:
        raise SequenceRefused(invalid, f"{generated} tokens were generated already, of {max_tokens}")
    if length >= config.max_model_len:
        raise SequenceRefused(
            too_long, f"{length} tokens leave no room to generate in a context of {config.max_model_len}"
        )
    # The last token is never fed back, so it needs no KV.
    needed = pool.blocks_for(sequence.longest - 1)
    if needed > pool.total:
        raise SequenceRefused(
            too_long,
            f"the sequence can grow to {needed} KV blocks of {pool.block_size} tokens, "
            f"and the engine has {pool.total}",
        )


def check_group(members: list[Sequence], config: SchedulerConfig, pool: BlockPool) -> None:
    """Raise SequenceRefused for a beam search that can never run, whose first member is admissible."""
    lead, width = members[0], len(members)
    if config.contiguous:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT, "beams share KV blocks, which contiguous_kv excludes"
        )
    if width > config.max_num_seqs:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT,
            f"a search of {width} beams does not fit max_num_seqs, {config.max_num_seqs}",
        )
    # All beams begin with the full blocks of the prompt.
    longest, common = pool.blocks_for(lead.longest - 1), lead.prompt_len // pool.block_size
    needed = longest + (width - 1) * (longest - common)
    if needed > pool.total:
        raise SequenceRefused(
            CoreErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the beams can grow to {needed} KV blocks of {pool.block_size} tokens, "
            f"and the engine has {pool.total}",
            "use_beam_search",
        )


def check_buckets(config: SchedulerConfig, pool: BlockPool, buckets: BucketPlan) -> None:
    """Raise ValueError for buckets that do not reach what a step can hold."""
    query = min(config.prompt_budget(0), config.max_model_len - 1, buckets.max_prefill_query)
    longest = min(pool.total, pool.blocks_for(config.max_model_len - 1))
    if buckets.block_size != pool.block_size:
        raise ValueError(
            f"buckets expect blocks of {buckets.block_size} tokens, the pool has {pool.block_size}"
        )
    for tokens in (1, query):
        context = pool.blocks_for(config.max_model_len - 1 - tokens)
        if buckets.prefill_bucket(1, tokens, context) is None:
            raise ValueError(f"no prefill bucket covers {tokens} tokens after {context} blocks")
    if buckets.decode_bucket(1, longest) is None:
        raise ValueError(f"no decode bucket covers a sequence of {longest} blocks")
    if config.contiguous and pool.prefix_caching:
        raise ValueError("contiguous KV cannot share blocks: switch prefix caching off, or contiguous KV")
    # The lowest ids go out first, so none is used beyond what all that run can hold.
    slice_end = min(pool.total, config.max_num_seqs * longest)
    if config.contiguous and buckets.decode_bucket(1, slice_end) is None:
        raise ValueError(f"contiguous KV needs a decode bucket for the first {slice_end} blocks of the pool")


# One step runs while the next is planned.
_MAX_IN_FLIGHT: Final = 2


_RUNNING: Final = SequenceStatus.RUNNING
_FINISHED: Final = SequenceStatus.FINISHED


class Scheduler:
    """Owns every live sequence; `transfer_blocks` belong to none.

    Drive it as: plan, run the plan, commit it with the sampled tokens; again.

    One more step may be planned before the last one is committed: planning overlaps the device's work. Plans
    are committed in their order. A sequence may be ended between any two calls. Blocks and rows that become
    free while a step is in flight are given out again at once: the device runs steps in order, so their new
    owner writes after the last one.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, buckets: BucketPlan) -> None:
        check_buckets(config, pool, buckets)
        self._config = config
        self.pool = pool
        self._waiting = WaitingQueue()
        self.running = RunningSet(config.max_num_seqs, pool.block_size)
        self.shared = SharedPrompts(pool, self._waiting)
        self._beams = Beams(pool, self._waiting, self.running)
        self.transfer_blocks = TransferBlocks(pool)
        self.planner = Planner(
            config,
            pool,
            buckets,
            self._waiting,
            self.running,
            self.shared,
            self._beams,
            self.transfer_blocks,
        )
        self.live: dict[int, Sequence] = {}
        """The sequences that have not ended, by key."""
        self._in_flight: deque[StepPlan] = deque()
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence lives."""
        return bool(self.live)

    @property
    def provided(self) -> int:
        """How often a sequence started with KV that had arrived for it."""
        return self.shared.provided

    @property
    def forfeited(self) -> int:
        """How often KV had arrived for a sequence and was given up before it could start."""
        return self.shared.forfeited

    def load(self) -> SchedulerLoad:
        """Return the load now."""
        return SchedulerLoad(
            running=len(self.running),
            waiting=len(self._waiting),
            used_blocks=self.pool.used,
            pending_prefill_tokens=self._waiting.tokens + self.running.prefill_tokens,
        )

    @property
    def kv_events(self) -> KvEventLog:
        """Changes of the prefix cache."""
        return self.pool.events

    @property
    def counts(self) -> StartCounts:
        """Admissions and preemptions since the start; a live object."""
        return self.planner.counts

    def add(self, sequence: Sequence, same_prompt_as: int | None = None) -> None:
        """Queue a new sequence.

        `same_prompt_as`: key of one with the same prompt and salt, which computes it for both if it lives and
        the KV is not contiguous.

        Raises SequenceRefused for one that can never run, QueueFull if too many live, SchedulerError for a
        key that is in use.
        """
        set_lengths(sequence, self._config)
        check_admissible(sequence, self._config, self.pool)
        other = None
        if same_prompt_as is not None and not self._config.contiguous:
            other = self.live.get(same_prompt_as)
        self._enter([sequence])
        provided = self.transfer_blocks.take(sequence.key)
        if provided is not None:
            self.shared.provide(sequence, sequence.prompt_len - 1, provided)
            self._waiting.push(sequence)
        elif other is None or other.group is not None or not self.shared.join(sequence, other):
            self._waiting.push(sequence)

    def add_beams(self, members: list[Sequence]) -> None:
        """Queue a beam search: as many sequences as it has beams, the first of which has the prompt.

        That one stands for all of them: to end one is to end all, and the result names the first. The others
        have no tokens yet, and the same lengths and priority. Raises as `add` does.
        """
        lead = members[0]
        for member in members:
            member.prompt_len = lead.prompt_len
            set_lengths(member, self._config)
        check_admissible(lead, self._config, self.pool)
        check_group(members, self._config, self.pool)
        self._enter(members)
        self._beams.wait(BeamGroup(members))

    def branch(self, group: BeamGroup, choices: Iterable[tuple[Sequence, int]]) -> None:
        """Answer a Scored outcome with continuations: pairs of a beam and its next token, best first."""
        self._beams.branch(group, choices)

    def expect(self, sequence: Sequence) -> IncomingPrefix | None:
        """Allocate transfer blocks, under a new sequence's key, for the KV of its prompt but the last token.

        None if too few are free. When the KV is there, call `arrived` and `add`.
        """
        tokens = sequence.prompt_len - 1
        hits = cached_prefix(sequence, tokens, self.pool)
        missing = self.pool.blocks_for(tokens) - len(hits)
        free = self.pool.free_count - self.pool.idle(hits) - reserved_blocks(len(self.running))
        if missing > free:
            return None
        # The hits come first, so that the allocation evicts none of them.
        self.pool.acquire(hits)
        blocks = hits + self.pool.allocate(missing)
        self.transfer_blocks.keep(sequence.key, blocks)
        return IncomingPrefix(blocks, len(hits))

    def arrived(self, sequence: Sequence, incoming: IncomingPrefix) -> bool:
        """Publish blocks whose KV is there; the sequence begins with its last token once it is added.

        False if they were evicted meanwhile.
        """
        if self.transfer_blocks.table(sequence.key) is not incoming.blocks:
            return False
        tokens, start = sequence.prompt_len - 1, incoming.hits * self.pool.block_size
        publish_table(sequence, incoming.blocks, start, tokens, self.pool)
        sequence.num_transferred_tokens = tokens - start
        return True

    def _enter(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.key in self.live:
                raise SchedulerError(f"sequence {sequence.key} is already live")
        if len(self.live) + len(sequences) > self._config.max_num_seqs + self._config.max_waiting:
            raise QueueFull("max_waiting", self._config.max_waiting)
        for sequence in sequences:
            self._arrivals += 1
            aged = sequence.params.priority * self._config.priority_ageing_steps + self.planner.step
            sequence.order = (aged, self._arrivals)
            self.live[sequence.key] = sequence

    def abort(self, key: int) -> bool:
        """End a sequence wherever it is and free its blocks. False if it is not live."""
        return self.end(key, FinishReason.ABORT) is not None

    def end(self, key: int, reason: FinishReason) -> Finished | None:
        """End a sequence from outside, between any two calls, for this reason. None if it is not live.

        Tokens of a step in flight are dropped when that step is committed.
        """
        sequence = self.live.get(key)
        if sequence is None:
            return None
        members = [sequence] if sequence.group is None else sequence.group.members
        for member in members:
            if reason is FinishReason.ERROR:
                # The fault may be in its KV.
                self.pool.forget(member.block_table)
            self._retire(member, failed=reason is FinishReason.ERROR)
        return Finished(members[0], None, reason)

    def plan(self) -> StepPlan | None:
        """Decide the next step, allocates its blocks and book its tokens as computed.

        None if no sequence lives, or none can be computed before the step in flight is committed. Raises
        SchedulerError if two steps are in flight.
        """
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            raise SchedulerError("two steps are planned already and not committed")
        if self._in_flight and self.planner.preempted_only:
            # A preempted sequence must not be admitted before its token in flight is committed.
            return None
        plan = self.planner.plan()
        if plan is not None:
            self._in_flight.append(plan)
        elif self.live and not self._in_flight:
            raise SchedulerError("sequences are live and none can be computed")
        return plan

    def commit(self, plan: StepPlan, sampled: Mapping[int, int]) -> list[Outcome | Scored]:
        """Book the tokens of a step that was run: the earliest that is not committed.

        `sampled` maps the keys of `plan.sampling()` to their new token ids. Return an outcome for each, in
        the plan's order. A sequence that was ended meanwhile is left out, and its token may be missing; so a
        step that failed is committed without tokens, after its sequences were ended. Beams take no token:
        when those of a group have all been computed, the group is Scored. Raises SchedulerError for another
        plan, or a missing token.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise SchedulerError("a plan is committed that is not the earliest of those in flight")
        self._in_flight.popleft()
        outcomes: list[Outcome | Scored] = []
        for chunk in plan.prefills:
            # A sequence that was preempted in flight takes its token, and has no blocks to publish.
            if chunk.sequence.status is _RUNNING:
                publish_blocks(chunk.sequence, chunk.start, chunk.end, self.pool)
                if chunk.end >= chunk.sequence.prompt_len:
                    self.shared.computed(chunk.sequence)
            if chunk.samples and not chunk.sequence.finished:
                group = chunk.sequence.group
                if group is None:
                    outcomes.append(self._take(chunk.sequence, chunk.end, sampled))
                else:
                    outcomes += self._score(chunk.sequence, group)
        size = self.pool.block_size
        for row in plan.decodes:
            sequence, end = row.sequence, row.position + 1
            status = sequence.status
            if status is _FINISHED:
                continue
            if sequence.group is not None:
                outcomes += self._score(sequence, sequence.group)
                continue
            if not end % size and status is _RUNNING:
                publish_blocks(sequence, row.position, end, self.pool)
            outcomes.append(self._take(sequence, end, sampled))
        return outcomes

    def check(self) -> None:
        """Compare all books, in idle moments and tests. Raises BlockError or SchedulerError."""
        tables = [sequence.block_table for sequence in self.live.values()]
        self.pool.check(tables + self.shared.tables() + self.transfer_blocks.tables())
        self.shared.check()
        if len(self.live) != len(self.running) + len(self._waiting):
            raise SchedulerError("the live sequences are not the running and the waiting ones")
        self.running.check()

    def _score(self, beam: Sequence, group: BeamGroup) -> list[Scored]:
        """Note that a beam's next token can be chosen. One that was preempted will be computed again."""
        beam.num_pending -= 1
        if beam.status is not _RUNNING:
            return []
        group.scored.add(beam.key)
        return [Scored(group)] if len(group.scored) == len(group.active) else []

    def _take(self, sequence: Sequence, index: int, sampled: Mapping[int, int]) -> Outcome:
        """Append the token that was sampled for this index of a sequence, which may wait again by now."""
        token = sampled.get(sequence.key)
        if token is None:
            raise SchedulerError(f"no token was sampled for sequence {sequence.key}")
        if len(sequence.token_ids) != index:
            raise SchedulerError(f"sequence {sequence.key} is not where the committed plan left it")
        sequence.token_ids.append(token)
        sequence.num_pending -= 1
        if sequence.status is not _RUNNING:
            self._waiting.tokens += 1
        # The common case, without a call.
        if index + 1 < sequence.longest and token not in sequence.params.stop_ids:
            return Advanced(sequence, token)
        reason = finish_reason(sequence)
        if reason is None:
            return Advanced(sequence, token)
        self._retire(sequence, keep=sequence.hands_over)
        return Finished(sequence, token, reason, token if reason is FinishReason.STOP else None)

    def _retire(self, sequence: Sequence, *, failed: bool = False, keep: bool = False) -> None:
        del self.live[sequence.key]
        runs = sequence.status is _RUNNING
        if runs:
            self.running.remove(sequence)
        blocks = sequence.finish()
        if keep:
            self.transfer_blocks.keep(sequence.key, blocks)
        else:
            self.pool.free(blocks)
        if not runs:
            self._waiting.discard(sequence)
        self.shared.left(sequence, failed=failed and runs)
