"""Prompts that several sequences begin with: one of these computes it, and the others take its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.engine.kv import BlockPool
from services.engine.scheduler.errors import SchedulerError
from services.engine.scheduler.sequence import Sequence, SequenceStatus
from services.engine.scheduler.waiting import WaitingQueue


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """A prompt of `length` tokens, and who has not started with it.

    `leader` computes it, or waits to; None once that is done, or if it ended before. `blocks` hold it from
    then on; they may be given up at any time. The others are `held`, by order, but for the first of them:
    when there are blocks, or nobody to wait for, it is the `candidate` and queues as anybody does.
    """

    length: int
    leader: Sequence | None = None
    candidate: Sequence | None = None
    held: list[Sequence] = field(default_factory=list)
    # Its KV came from elsewhere, and nobody has started with it.
    provided: bool = False
    blocks: list[int] = field(default_factory=list)

    def before(self) -> Iterator[Sequence]:
        """Whoever a newcomer would have to wait for."""
        yield from (one for one in (self.leader, self.candidate) if one is not None)
        yield from self.held


class SharedPrompts:
    """All shared prompts. There is one reference from here to each block that they keep.

    Nobody waits for a sequence that comes later in order, so nobody waits longer than without sharing. And
    there is always somebody to wait for: a leader that ends is followed by the next in order.
    """

    def __init__(self, pool: BlockPool, waiting: WaitingQueue) -> None:
        self._pool = pool
        self._waiting = waiting
        self._of: dict[int, SharedPrompt] = {}
        # Those with blocks.
        self._kept: dict[int, SharedPrompt] = {}
        # How often a sequence started with provided blocks, or they were given up before.
        self.provided = self.forfeited = 0

    def join(self, sequence: Sequence, other: Sequence) -> bool:
        """Makes a new sequence share a live one's prompt, and wait. False, changing nothing, if it cannot.

        Who wants log probabilities of its prompt computes it itself.
        """
        if not _alike(sequence, other):
            return False
        shared = self._of.get(other.key)
        if shared is None:
            shared = SharedPrompt(other.prompt_len, leader=None if other.prompt_computed else other)
        if any(one.order > sequence.order for one in shared.before()):
            return False
        if other.prompt_computed and not (shared.blocks or shared.leader or shared.candidate):
            self._keep(shared, other)
        self._of[other.key] = self._of[sequence.key] = shared
        shared.held.append(sequence)
        self._waiting.hold(sequence)
        self._advance(shared)
        return True

    def provide(self, sequence: Sequence, length: int, blocks: list[int]) -> None:
        """Gives a new sequence, which is to queue, the KV of its first `length` tokens.

        Takes over the caller's references to the blocks.
        """
        shared = SharedPrompt(length, candidate=sequence, blocks=blocks, provided=True)
        self._of[sequence.key] = shared
        self._kept[id(shared)] = shared

    def found(self, sequence: Sequence) -> SharedPrompt | None:
        """The prompt that a waiting sequence can start with, if its blocks are there."""
        shared = self._of.get(sequence.key)
        usable = shared is not None and shared.blocks and sequence.params.sampling.prompt_logprobs < 0
        return shared if usable else None

    def started(self, sequence: Sequence) -> None:
        """Notes that a sequence has got its blocks: those of its prompt, or all of its own to compute it."""
        shared = self._of.get(sequence.key)
        if shared is not None and shared.candidate is sequence:
            shared.candidate = None
            self.provided += shared.provided and bool(shared.blocks)
            shared.provided = False
            self._advance(shared)

    def computed(self, sequence: Sequence) -> None:
        """Notes that all of a running sequence's prompt is computed, by steps that are committed."""
        sequence.prompt_computed = True
        shared = self._of.get(sequence.key)
        if shared is not None and shared.leader is sequence:
            shared.leader = None
            self._keep(shared, sequence)
            self._advance(shared)

    def left(self, sequence: Sequence, *, failed: bool) -> None:
        """Notes that a sequence ended. What one that `failed` computed is not to be trusted."""
        shared = self._of.pop(sequence.key, None)
        if shared is None:
            return
        if shared.candidate is sequence:
            shared.candidate = None
        elif sequence in shared.held:
            shared.held.remove(sequence)
        if shared.leader is sequence:
            shared.leader = None
        if failed:
            self._give_up(shared)
        self._advance(shared)

    def give_up(self) -> bool:
        """Gives up the blocks of a prompt with which nobody runs, if there is one: blocks are short."""
        for shared in self._kept.values():
            if any(self._pool.references(block) == 1 for block in shared.blocks):
                self._give_up(shared)
                return True
        return False

    def tables(self) -> list[list[int]]:
        """The kept blocks of each prompt."""
        return [shared.blocks for shared in self._kept.values()]

    def check(self) -> None:
        """Raises SchedulerError if somebody waits for nothing."""
        for shared in set(self._of.values()):
            ahead = shared.candidate or shared.leader
            if shared.held and (ahead is None or ahead.finished):
                raise SchedulerError("sequences wait for a prompt that nobody computes")
            if any(one.status is not SequenceStatus.WAITING for one in shared.held):
                raise SchedulerError("a sequence that waits for a prompt does not wait")

    def _keep(self, shared: SharedPrompt, owner: Sequence) -> None:
        """Adds a reference to the blocks of the owner's prompt: they outlive it."""
        shared.blocks = owner.block_table[: self._pool.blocks_for(shared.length)]
        self._pool.share(shared.blocks)
        self._kept[id(shared)] = shared

    def _give_up(self, shared: SharedPrompt) -> None:
        if shared.blocks:
            self.forfeited += shared.provided and shared.candidate is not None
            self._pool.free(shared.blocks)
            shared.blocks = []
            del self._kept[id(shared)]
        if shared.leader is None:
            shared.leader = shared.candidate

    def _advance(self, shared: SharedPrompt) -> None:
        """Lets the next in order queue when it has nothing to wait for."""
        if shared.candidate is None and not shared.held:
            self._give_up(shared)
        elif shared.candidate is None and (shared.blocks or shared.leader is None):
            shared.candidate = shared.held.pop(0)
            self._waiting.release(shared.candidate)
            if not shared.blocks:
                shared.leader = shared.candidate


def _alike(sequence: Sequence, other: Sequence) -> bool:
    length = other.prompt_len
    return (
        sequence.prompt_len == length > 1
        and sequence.cache_salt == other.cache_salt
        and sequence.params.sampling.prompt_logprobs < 0
        and sequence.token_ids[:length] == other.token_ids[:length]
    )
