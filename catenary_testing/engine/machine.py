"""The scripted engine's scheduler: continuous batching over counted blocks, one call a step, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from catenary_testing.engine.blocks import ScriptedBlocks
from catenary_testing.engine.columns import Columns
from catenary_testing.engine.offers import ScriptedOffers
from catenary_testing.engine.script import Script, Then
from catenary_testing.engine.sequence import ScriptedSequence, Status
from services.engine.core import KvNews
from services.engine.domain import FinishReason
from services.engine.link import CoreLoad, CoreStep, SubmitSequence


class QueueFull(Exception):
    """The waiting queue holds `max_waiting` sequences."""


class ScriptedMachine:
    """Sequences, blocks and steps of one life of a scripted core. Deterministic.

    A sequence of n tokens holds ceil(n / block_size) blocks. One that finds no block when it grows sends the
    youngest running sequence back to the queue, which computes its prompt again later. No token depends on
    what was cached.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._capacity = script.capacity
        self._sequences: dict[int, ScriptedSequence] = {}
        self._waiting: deque[ScriptedSequence] = deque()
        self._running: list[ScriptedSequence] = []
        self._aborted: list[int] = []
        self._blocks = ScriptedBlocks(script.capacity)
        self._offers = ScriptedOffers(script.capacity.block_size)
        self._withdrew = False
        self._steps = 0
        self._generated = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._preemptions = 0
        self._work = StepWork()

    def submit(self, spec: SubmitSequence) -> None:
        """Queue a sequence. Raises QueueFull."""
        limit = self._capacity.max_waiting + self._capacity.max_running
        if len(self._sequences) >= limit:
            raise QueueFull
        sequence = ScriptedSequence(
            spec, self._script.rule_for(spec.token_ids[: spec.prompt_len]), self._script.model
        )
        self._sequences[spec.key] = sequence
        self._waiting.append(sequence)

    def abort(self, keys: Iterable[int]) -> None:
        """End these sequences with the next step, or what ended ones offer. Other keys are ignored."""
        for key in keys:
            if self._offers.withdraw(key):
                self._withdrew = True
            else:
                self._aborted.append(key)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, now or when blocks come free."""
        return bool(self._sequences) or self._withdrew

    @property
    def step_delay_s(self) -> float:
        """How long the next step lasts at least, by the script."""
        return max((s.step_delay_s for s in self._running), default=0.0) or self._script.step_delay_ms / 1000

    @property
    def cost_s(self) -> float:
        """How long the last step took by the script's latency model."""
        work = self._work
        if not work.sequences:
            return 0.0
        return self._script.latency.seconds(work.prefill_tokens, work.sequences, work.blocks)

    @property
    def kv_news(self) -> KvNews:
        """What the prefix cache holds."""
        return self._blocks.news

    @property
    def longest(self) -> int:
        """Most tokens that one live sequence has generated."""
        return max((s.generated for s in self._running), default=0)

    @property
    def load(self) -> CoreLoad:
        """Counts as they stand."""
        return CoreLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self._blocks.used,
            pending_prefill_tokens=sum(len(s.token_ids) - s.computed for s in self._waiting)
            + sum(max(0, len(s.token_ids) - 1 - s.computed) for s in self._running),
            steps=self._steps,
            generated_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            preemptions=self._preemptions,
            transfers=self._offers.load(),
        )

    def step(self) -> CoreStep | None:
        """Advance everything by one step; None if there was nothing to say."""
        columns = Columns()
        self._work = StepWork()
        self._end_aborted(columns)
        budget = self._capacity.max_batched_tokens
        for sequence in list(self._running):
            if sequence.status is Status.RUNNING and budget > 0:
                budget -= self._advance(sequence, budget, columns)
        self._admit(budget, columns)
        withdrew, self._withdrew = self._withdrew, False
        if not columns.rows and not withdrew:
            return None
        self._steps += columns.rows
        return CoreStep(columns=columns.build(), load=self.load)

    def _end_aborted(self, columns: Columns) -> None:
        for key in self._aborted:
            sequence = self._sequences.get(key)
            if sequence is not None:
                self._finish(sequence)
                columns.end(sequence, FinishReason.ABORT)
        self._aborted.clear()

    def _admit(self, budget: int, columns: Columns) -> None:
        while self._waiting and len(self._running) < self._capacity.max_running and budget > 0:
            sequence = self._waiting[0]
            if not self._blocks.start(sequence):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.status = Status.RUNNING
            if not sequence.started:
                sequence.started = True
                self._prompt_tokens += sequence.spec.prompt_len
                self._cached_prompt_tokens += sequence.cached_tokens
            budget -= self._advance(sequence, budget, columns)

    def _advance(self, sequence: ScriptedSequence, budget: int, columns: Columns) -> int:
        """Compute up to `budget` tokens of the sequence, then draw one if all are computed; tokens spent."""
        if not self._hold(sequence):
            return 0
        goal = len(sequence.token_ids) - sequence.spec.prefill_only
        if not sequence.asked:
            sequence.asked = True
            self._arrive(sequence)
        chunk = min(budget, goal - sequence.computed)
        self._work.add(chunk, len(sequence.block_table))
        self._blocks.computed(sequence, chunk)
        if sequence.computed == goal:
            self._draw(sequence, columns)
        else:
            columns.quiet(sequence)
        return chunk

    def _draw(self, sequence: ScriptedSequence, columns: Columns) -> None:
        if sequence.outcome is Then.ERROR:
            self._finish(sequence, failed=True)
            columns.end(sequence, FinishReason.ERROR)
            return
        if sequence.outcome in (Then.CRASH, Then.STALL):
            # In its first forward; `stuck` tells of it.
            columns.quiet(sequence)
            return
        if sequence.spec.prefill_only:
            self._finish(sequence)
            columns.end(sequence, FinishReason.STOP, offer=self._offers.offer(sequence.spec))
            return
        if sequence.spec.pooling is not None:
            self._finish(sequence)
            columns.end(sequence, FinishReason.STOP, vector=sequence.vector())
            return
        drawn = sequence.draw()
        self._generated += 1
        columns.token(sequence, drawn)
        if drawn.token in sequence.stop_ids() and sequence.generated >= sequence.spec.min_tokens:
            self._finish(sequence)
            columns.end(sequence, FinishReason.STOP, stop_token_id=drawn.token)
        elif sequence.generated >= sequence.spec.max_tokens:
            self._finish(sequence)
            columns.end(sequence, FinishReason.LENGTH)

    def _arrive(self, sequence: ScriptedSequence) -> None:
        """Takes the KV that another engine has of its prompt, if that is so."""
        if self._offers.arrives(sequence.spec):
            sequence.transferred_tokens = sequence.spec.prompt_len - 1 - sequence.computed
            self._blocks.computed(sequence, sequence.transferred_tokens)

    def stuck(self) -> Then | None:
        """STALL or CRASH if some running sequence's rule asks for it now."""
        outcomes = {s.outcome for s in self._running}
        return next((o for o in (Then.CRASH, Then.STALL) if o in outcomes), None)

    def _hold(self, sequence: ScriptedSequence) -> bool:
        """Give the sequence the blocks for its tokens; False if it was itself sent back for want of them."""
        missing = self._blocks.missing(sequence)
        while missing and not self._blocks.grow(sequence, missing):
            youngest = self._running[-1]
            self._release(youngest)
            self._preemptions += 1
            youngest.status = Status.WAITING
            self._waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def _finish(self, sequence: ScriptedSequence, *, failed: bool = False) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._release(sequence, failed=failed)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.spec.key]

    def _release(self, sequence: ScriptedSequence, *, failed: bool = False) -> None:
        self._running.remove(sequence)
        self._blocks.release(sequence, failed=failed)


@dataclass(slots=True)
class StepWork:
    """What a step computes. A sequence with one token to compute decodes."""

    prefill_tokens: int = 0
    sequences: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int) -> None:
        """A sequence computes so many tokens and holds so many blocks."""
        self.sequences += 1
        self.blocks += blocks
        if tokens > 1:
            self.prefill_tokens += tokens
