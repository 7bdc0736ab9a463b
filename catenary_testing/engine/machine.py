"""The scripted machine: sequences, KV blocks and offered prompts, advanced step by step."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from catenary.transfer import TransferFault
from catenary_testing.engine.columns import Columns
from catenary_testing.engine.script import Script, ScriptedCapacity, Then
from catenary_testing.engine.sequence import ScriptedSequence, Status
from services.engine.core import KvEventDelta
from services.engine.domain import FinishReason
from services.engine.kv import BlockPool
from services.engine.link import CoreLoad, CoreStep, OfferedKv, SubmitSequence, TransferLoad


class ScriptedBlocks:
    """Blocks of sequences. A sequence of n tokens holds ceil(n / block_size)."""

    def __init__(self, capacity: ScriptedCapacity) -> None:
        self._pool = BlockPool(
            capacity.total_blocks, capacity.block_size, prefix_caching=capacity.prefix_caching
        )
        self._size = capacity.block_size
        self.news = KvEventDelta(self._pool.events)

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self._pool.used

    def start(self, sequence: ScriptedSequence) -> bool:
        """Give a waiting sequence what is cached of its prompt, if there is room for the rest of it too.

        Its last token is always computed.
        """
        pool, length = self._pool, len(sequence.token_ids)
        missing = pool.blocks_for(length)
        hits: list[int] = []
        if pool.prefix_caching and sequence.takes_hits:
            hittable = (length - 1) // pool.block_size
            hits = pool.lookup(sequence.block_names(hittable, pool.block_size))
        if missing - len(hits) > pool.free_count - pool.idle(hits):
            return False
        pool.acquire(hits)
        sequence.block_table = hits
        sequence.computed = len(hits) * pool.block_size
        if not sequence.started:
            sequence.cached_tokens = min(sequence.computed, sequence.spec.prompt_len)
        return True

    def missing(self, sequence: ScriptedSequence) -> int:
        """Return how many blocks a sequence needs in addition to those it has."""
        return -(-len(sequence.token_ids) // self._size) - len(sequence.block_table)

    def grow(self, sequence: ScriptedSequence, count: int) -> bool:
        """Give a sequence so many more blocks; False if not as many are free."""
        if count > self._pool.free_count:
            return False
        sequence.block_table += self._pool.allocate(count)
        return True

    def computed(self, sequence: ScriptedSequence, count: int) -> None:
        """Note that the next `count` tokens of a sequence are computed: others can hit what they fill."""
        size, before = self._size, sequence.computed
        sequence.computed = before + count
        if not self._pool.prefix_caching or sequence.spec.pooling is not None:
            return
        first, last = before // size, (before + count) // size
        if first == last:
            return
        names = sequence.block_names(last, size)
        for index in range(first, last):
            self._pool.publish(sequence.block_table[index], names[index])

    def release(self, sequence: ScriptedSequence, *, failed: bool = False) -> None:
        """Take a sequence's blocks. What one that `failed` computed is not to be trusted."""
        if failed:
            self._pool.forget(sequence.block_table)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.computed = 0


CONNECTOR = "scripted"
# Offers that an abort still withdraws.
_MOST_OFFERS = 4096


def ticket_of(spec: SubmitSequence) -> bytes:
    """Return the ticket of a prompt's offer: any scripted engine can tell whose an offer is."""
    tokens = spec.token_ids[: spec.prompt_len - 1]
    packed = struct.pack(f"<{len(tokens)}I", *tokens) + spec.cache_salt.encode()
    return hashlib.blake2b(packed, digest_size=16).digest()


class ScriptedOffers:
    """Offers of computed prompts, and counts of the outcome of other engines' offers."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._open: OrderedDict[int, None] = OrderedDict()
        self._made = 0
        self._withdrawn = 0
        self._arrived = 0
        self._faults: dict[str, int] = {}

    def offer(self, spec: SubmitSequence) -> OfferedKv:
        """Return the offer of a prompt that was computed."""
        tokens = spec.prompt_len - 1
        self._made += 1
        self._open[spec.key] = None
        if len(self._open) > _MOST_OFFERS:
            self._open.popitem(last=False)
        return OfferedKv(
            connector=CONNECTOR,
            address="",
            ticket=ticket_of(spec),
            host_id="",
            blocks=-(-tokens // self._block_size),
            tokens=tokens,
            layout=CONNECTOR.encode(),
        )

    def withdraw(self, key: int) -> bool:
        """End an offer. Return False if there is none."""
        if key not in self._open:
            return False
        del self._open[key]
        self._withdrawn += 1
        return True

    def arrives(self, spec: SubmitSequence) -> bool:
        """Count and return whether the offer that came with a sequence is good."""
        if spec.kv_offer is None:
            return False
        if spec.kv_offer.ticket != ticket_of(spec):
            fault = TransferFault.MISMATCH.value
            self._faults[fault] = self._faults.get(fault, 0) + 1
            return False
        self._arrived += 1
        return True

    def load(self) -> TransferLoad:
        """Return the load for reports; nothing is kept, so nothing is held now."""
        return TransferLoad(
            made=self._made,
            withdrawn=self._withdrawn,
            arrived=self._arrived,
            faults=dict(self._faults),
        )


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
    def kv_event_delta(self) -> KvEventDelta:
        """Changes of the prefix cache."""
        return self._blocks.news

    @property
    def longest(self) -> int:
        """Most tokens that one live sequence has generated."""
        return max((s.generated for s in self._running), default=0)

    @property
    def load(self) -> CoreLoad:
        """Counts at this moment."""
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
        """Take the KV that another engine has of its prompt, if any."""
        if self._offers.arrives(sequence.spec):
            sequence.transferred_tokens = sequence.spec.prompt_len - 1 - sequence.computed
            self._blocks.computed(sequence, sequence.transferred_tokens)

    def stuck(self) -> Then | None:
        """Return STALL or CRASH if some running sequence's rule asks for it now."""
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
    """Return the work of a step. A sequence with one token to compute decodes."""

    prefill_tokens: int = 0
    sequences: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int) -> None:
        """Add a sequence that computes so many tokens and holds so many blocks."""
        self.sequences += 1
        self.blocks += blocks
        if tokens > 1:
            self.prefill_tokens += tokens
