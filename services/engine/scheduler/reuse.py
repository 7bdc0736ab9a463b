"""KV that exists before a sequence starts: cached prefixes, shared prompts, blocks held for transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from catenary.blockhash import BlockHashes, chain
from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler.queues import WaitingQueue
from services.engine.scheduler.sequence import SchedulerError, Sequence, SequenceStatus


@dataclass(eq=False, slots=True)
class SharedPrompt:
    """A prompt of `length` tokens, and the sequences that have not started with it.

    `leader` computes it, or waits to; None once that is done, or if it ended before. `blocks` hold it from
    then on; they may be evicted at any time. The others are `held`, by order, but for the first of them:
    when there are blocks, or no leader to wait for, it is the `candidate` and waits in the common queue.
    """

    length: int
    leader: Sequence | None = None
    candidate: Sequence | None = None
    held: list[Sequence] = field(default_factory=list)
    # Its KV came from another engine, and no sequence has started with it.
    provided: bool = False
    blocks: list[int] = field(default_factory=list)

    def before(self) -> Iterator[Sequence]:
        """Yield the sequences that a new one would have to wait for."""
        yield from (one for one in (self.leader, self.candidate) if one is not None)
        yield from self.held


class SharedPrompts:
    """All shared prompts, with one reference to each block that they hold.

    A sequence never waits for one that comes later in order, so none waits longer than without sharing. And
    there is always one to wait for: a leader that ends is followed by the next in order.
    """

    def __init__(self, pool: BlockPool, waiting: WaitingQueue) -> None:
        self._pool = pool
        self._waiting = waiting
        self._of: dict[int, SharedPrompt] = {}
        # Prompts with blocks.
        self._kept: dict[int, SharedPrompt] = {}
        # How often a sequence started with provided blocks, or they were given up before.
        self.provided = self.forfeited = 0

    def join(self, sequence: Sequence, other: Sequence) -> bool:
        """Let a new sequence share a live one's prompt, and wait. False, changing nothing, if it cannot.

        A sequence that wants log probabilities of its prompt computes it itself.
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
        """Give a new sequence, which is to queue, the KV of its first `length` tokens.

        The caller's references to the blocks pass to this object.
        """
        shared = SharedPrompt(length, candidate=sequence, blocks=blocks, provided=True)
        self._of[sequence.key] = shared
        self._kept[id(shared)] = shared

    def held(self) -> Iterator[Sequence]:
        """Yield the sequences that wait for another's prompt."""
        prompts = {id(shared): shared for shared in self._of.values()}
        return (sequence for shared in prompts.values() for sequence in shared.held)

    def found(self, sequence: Sequence) -> SharedPrompt | None:
        """Return the shared prompt that a waiting sequence can start with, if its blocks are there."""
        shared = self._of.get(sequence.key)
        usable = shared is not None and shared.blocks and sequence.params.sampling.prompt_logprobs < 0
        return shared if usable else None

    def started(self, sequence: Sequence) -> None:
        """Note that a sequence was admitted, with the blocks of its prompt or with its own to compute it."""
        shared = self._of.get(sequence.key)
        if shared is not None and shared.candidate is sequence:
            shared.candidate = None
            self.provided += shared.provided and bool(shared.blocks)
            shared.provided = False
            self._advance(shared)

    def computed(self, sequence: Sequence) -> None:
        """Note that all of a running sequence's prompt is computed, by steps that are committed."""
        sequence.prompt_computed = True
        shared = self._of.get(sequence.key)
        if shared is not None and shared.leader is sequence:
            shared.leader = None
            self._keep(shared, sequence)
            self._advance(shared)

    def left(self, sequence: Sequence, *, failed: bool) -> None:
        """Note that a sequence ended. KV of one that `failed` is not to be trusted."""
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
        """Evict the blocks of a prompt that no sequence runs with. False if there is none."""
        for shared in self._kept.values():
            if any(self._pool.references(block) == 1 for block in shared.blocks):
                self._give_up(shared)
                return True
        return False

    def tables(self) -> list[list[int]]:
        """Return the blocks of each prompt that holds some."""
        return [shared.blocks for shared in self._kept.values()]

    def check(self) -> None:
        """Raise SchedulerError if a sequence waits for nothing."""
        for shared in set(self._of.values()):
            ahead = shared.candidate or shared.leader
            if shared.held and (ahead is None or ahead.finished):
                raise SchedulerError("sequences wait for a prompt that is not computed")
            if any(one.status is not SequenceStatus.WAITING for one in shared.held):
                raise SchedulerError("a sequence that waits for a prompt does not wait")

    def _keep(self, shared: SharedPrompt, owner: Sequence) -> None:
        """Add a reference to the blocks of the owner's prompt, so that they outlive it."""
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
        """Queue the next in order when it has nothing to wait for."""
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


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks that a waiting sequence needs, and the tokens `start` that are computed then.

    `hits` hold the first of these tokens; `idle` of them are referenced by no sequence and count as free
    until they are acquired. `missing` more are to be allocated, and the first of those begins with tokens of
    the block `copied`, if that is not None. A group of beams takes `rows` rows and `beams` more blocks.
    """

    hits: list[int]
    idle: int
    missing: int
    start: int = 0
    copied: int | None = None
    shared: bool = False
    rows: int = 1
    beams: int = 0

    @property
    def allocated(self) -> int:
        """Blocks to be allocated."""
        return self.missing + self.beams


def demand_of(sequence: Sequence, pool: BlockPool, shared: SharedPrompt | None) -> Demand:
    """Return the blocks that a waiting sequence needs, with cached KV of all tokens but the last.

    The last token's logits have to be computed. `shared`: its prompt, if that is held. Else it is looked up
    in the cache, unless the sequence wants log probabilities of its prompt, which is then computed in full.
    """
    length, size = len(sequence.token_ids), pool.block_size
    total = pool.blocks_for(length)
    if shared is not None:
        start = min(shared.length, length - 1)
        full = start // size
        copied = shared.blocks[full] if start % size else None
        return Demand(shared.blocks[:full], 0, total - full, start, copied, shared=True)
    if not pool.prefix_caching or sequence.params.sampling.prompt_logprobs >= 0:
        return Demand([], 0, total)
    hittable = (length - 1) // size
    hits = pool.lookup(_hashes(sequence, hittable, size)[:hittable])
    return Demand(hits, pool.idle(hits), total - len(hits), len(hits) * size)


def take_blocks(
    sequence: Sequence, demand: Demand, pool: BlockPool
) -> tuple[list[int], tuple[BlockMove, ...]]:
    """Acquire the hits and allocate the rest; returns the block table, and what is to be copied into it.

    The hits come first: what an allocation evicts may then be none of them. Only the first start counts as
    cached for the caller, and only tokens of the prompt do.
    """
    if demand.shared:
        pool.share(demand.hits)
    else:
        pool.acquire(demand.hits)
    if not sequence.num_preemptions:
        _count_tokens(sequence, demand, pool)
    fresh = pool.allocate(demand.missing)
    copies: tuple[BlockMove, ...] = ()
    if demand.copied is not None:
        copies = (BlockMove(demand.copied, fresh[0], demand.start % pool.block_size),)
    return demand.hits + fresh, copies


def _count_tokens(sequence: Sequence, demand: Demand, pool: BlockPool) -> None:
    if not demand.shared:
        # The blocks that were fetched for it had to be evicted.
        sequence.num_transferred_tokens = 0
    if sequence.num_transferred_tokens:
        # All but the last token is there: the tokens that were not fetched were cached here.
        sequence.num_cached_tokens = demand.start - sequence.num_transferred_tokens
    elif pool.prefix_caching:
        sequence.num_cached_tokens = min(len(demand.hits) * pool.block_size, sequence.prompt_len)


def publish_blocks(sequence: Sequence, start: int, end: int, pool: BlockPool) -> None:
    """Publish the blocks that the computation of tokens [start, end) has filled."""
    publish_table(sequence, sequence.block_table, start, end, pool)


def publish_table(sequence: Sequence, table: list[int], start: int, end: int, pool: BlockPool) -> None:
    """Publish the blocks of a table that the computation of tokens [start, end) has filled."""
    size = pool.block_size
    first, last = start // size, end // size
    if first == last or not pool.prefix_caching:
        return
    hashes = _hashes(sequence, last, size)
    for index in range(first, last):
        pool.publish(table[index], hashes[index])


def prompt_name(sequence: Sequence, tokens: int, block_size: int) -> bytes:
    """Return the chained hash of the sequence's first tokens and salt, 16 bytes, which names their KV."""
    full = tokens // block_size
    hashes = _hashes(sequence, full, block_size)
    parent = hashes[full - 1] if full else b""
    return chain(parent, sequence.token_ids[full * block_size : tokens], salt=sequence.cache_salt)


def cached_prefix(sequence: Sequence, tokens: int, pool: BlockPool) -> list[int]:
    """Return the cached blocks that hold the beginning of the sequence's first tokens."""
    if not pool.prefix_caching:
        return []
    full = tokens // pool.block_size
    return pool.lookup(_hashes(sequence, full, pool.block_size)[:full])


def _hashes(sequence: Sequence, blocks: int, block_size: int) -> list[bytes]:
    """Return the hashes of at least the first `blocks` blocks, which must be full."""
    if sequence.hashes is None:
        sequence.hashes = BlockHashes(block_size, sequence.cache_salt)
    known = len(sequence.hashes.hashes)
    if known < blocks:
        sequence.hashes.extend(sequence.token_ids[known * block_size : blocks * block_size])
    return sequence.hashes.hashes


@dataclass(frozen=True, slots=True)
class IncomingPrefix:
    """Blocks for KV that comes from elsewhere; the first `hits` of them hold theirs already."""

    blocks: list[int]
    hits: int


class TransferBlocks:
    """Block tables by key, the oldest first. There is one reference from here to each block of each table.

    All of them may be evicted at any time, when sequences are short of blocks: callers look them up again
    before each use.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tables: dict[int, list[int]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._tables

    def keep(self, key: int, blocks: list[int]) -> None:
        """Take over the caller's references to the blocks of a table."""
        self._tables[key] = blocks

    def table(self, key: int) -> list[int] | None:
        """Return the blocks of a key, None if it has none (any more)."""
        return self._tables.get(key)

    def take(self, key: int) -> list[int] | None:
        """Remove a key and return its blocks with their references; None if it has none (any more)."""
        return self._tables.pop(key, None)

    def release(self, key: int) -> bool:
        """Free the blocks of a key. False if it has none."""
        blocks = self._tables.pop(key, None)
        if blocks is None:
            return False
        self._pool.free(blocks)
        return True

    def give_up(self) -> bool:
        """Free the oldest table. False if there is none."""
        oldest = next(iter(self._tables), None)
        return oldest is not None and self.release(oldest)

    def tables(self) -> list[list[int]]:
        """Return all tables."""
        return list(self._tables.values())
