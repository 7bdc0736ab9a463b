"""The pool of KV blocks: free ones, used ones, and cached ones, found by the hash of their tokens.

Pure: blocks are ids here, the tensors are the runner's. Callers keep the block tables of sequences.
"""

from __future__ import annotations

import heapq
import operator
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final, TypeAlias


class OutOfBlocks(Exception):
    """Too few blocks are free. None was allocated."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} KV blocks were asked for and {free} are free")
        self.requested = requested
        self.free = free


class BlockError(Exception):
    """Defect: blocks were freed wrongly, or the books of the pool and its users differ."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A block became cached. Its hash names the blocks before it too."""

    sequence_number: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """A block was evicted."""

    sequence_number: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks were evicted."""

    sequence_number: int


KvEvent: TypeAlias = Stored | Removed | Cleared


class KvEventLog:
    """The latest events, numbered 1, 2, 3, ... without a gap, for one consumer.

    At most `capacity` events wait to be drained; then the oldest are dropped. The consumer sees that as a gap
    in the numbers: it takes all `names` and goes on with the events that are newer than `number`.
    """

    def __init__(self, capacity: int, contents: Collection[bytes]) -> None:
        """`contents` is a live view of the hashes that are cached, in any order."""
        if capacity < 1:
            raise ValueError(f"an event log holds at least one event, not {capacity}")
        self._waiting: deque[KvEvent] = deque(maxlen=capacity)
        self._contents = contents
        self._number = 0

    def stored(self, block_hash: bytes) -> None:
        """Log that a block became cached."""
        self._number += 1
        self._waiting.append(Stored(self._number, block_hash))

    def removed(self, block_hash: bytes) -> None:
        """Log that a block was evicted."""
        self._number += 1
        self._waiting.append(Removed(self._number, block_hash))

    def cleared(self) -> None:
        """Log that all blocks were evicted."""
        self._number += 1
        self._waiting.append(Cleared(self._number))

    def __len__(self) -> int:
        """Number of events that wait to be drained."""
        return len(self._waiting)

    @property
    def number(self) -> int:
        """Number of the latest event, drained or not."""
        return self._number

    def drain(self) -> list[KvEvent]:
        """Take the waiting events, oldest first."""
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def names(self) -> list[bytes]:
        """Return the hashes of all cached blocks as of the latest event, drained or not, in any order."""
        return list(self._contents)


# A step reads the slice up to the highest used block, holes included; its bucket pads that anyway.
_TOLERATED_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A copy of block `source` to block `target`, whose contents are not needed.

    `tokens`: how many of its tokens; the other slots of the target become zero. None: all of them.
    """

    source: int
    target: int
    tokens: int | None = None


def worth_moving(highest_used: int, used: int) -> bool:
    """Return True if more than an eighth of the slice up to the highest used block is holes.

    A move costs one read and one write of a block, once; a hole costs one read in every step until it is
    filled. Filling each of the last few at once would move blocks of nearly every sequence that ends.
    """
    length = highest_used + 1
    return (length - used) * _TOLERATED_SHARE > length


class FreeList:
    """Free ids, the lowest first, so that blocks in use stay near the start of the cache."""

    def __init__(self, total: int) -> None:
        """Hold the ids 0 .. total - 1."""
        # A sorted list is a heap.
        self._heap = list(range(total))

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, count: int) -> list[int]:
        """Take the `count` lowest ids, rising. There must be as many."""
        return [heapq.heappop(self._heap) for _ in range(count)]

    def put(self, block: int) -> None:
        """Take an id back."""
        heapq.heappush(self._heap, block)

    def check(self) -> frozenset[int]:
        """Return all ids. Raises BlockError if one is there twice or they are not a heap."""
        ids = frozenset(self._heap)
        if len(ids) != len(self._heap):
            raise BlockError("the list of free KV blocks names one twice")
        # The children of i are 2i + 1 and 2i + 2.
        heap, children = self._heap, (self._heap[1::2], self._heap[2::2])
        if not all(all(map(operator.le, heap, some)) for some in children):
            raise BlockError("the list of free KV blocks is out of order")
        return ids


class PrefixIndex:
    """Cached blocks by hash. The block that is idle for longest is evicted first.

    Every operation on one block is O(1).
    """

    def __init__(self, event_capacity: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._stored: dict[int, bytes] = {}
        # Not a dict: the first key of a dict whose front was deleted is found in O(n).
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.events = KvEventLog(event_capacity, self._stored.values())

    def __len__(self) -> int:
        """Number of cached blocks, in use or not."""
        return len(self._stored)

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` that is cached."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, block_hash: bytes) -> None:
        """Cache a block that is in use, unless another one is cached by this hash.

        Raises BlockError if the block has another hash: what a cached block holds does not change.
        """
        stored = self._stored.get(block)
        if stored is not None and stored != block_hash:
            raise BlockError(f"KV block {block} is cached with other contents")
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._stored[block] = block_hash
            self.events.stored(block_hash)

    def rest(self, block: int) -> bool:
        """Note that the block is idle now. False, noting nothing, if it is not cached."""
        if block not in self._stored:
            return False
        self._idle[block] = None
        return True

    def wake(self, block: int) -> None:
        """Note that an idle block is used again."""
        del self._idle[block]

    def evict(self) -> int:
        """Evict the block that is idle for longest, and return it. There must be one."""
        block, _ = self._idle.popitem(last=False)
        self._remove(block)
        return block

    def forget(self, block: int) -> bool:
        """Evict a block if it is cached. True if it was idle."""
        if block in self._stored:
            self._remove(block)
        idle = block in self._idle
        if idle:
            del self._idle[block]
        return idle

    def _remove(self, block: int) -> None:
        block_hash = self._stored.pop(block)
        del self._block_of[block_hash]
        self.events.removed(block_hash)

    def clear(self) -> list[int]:
        """Evict all blocks. Return the idle ones."""
        idle = list(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._stored.clear()
        self.events.cleared()
        return idle

    def check(self) -> frozenset[int]:
        """Return the idle blocks. Raises BlockError if the books differ."""
        stored = self._stored
        if len(stored) != len(self._block_of) or any(
            stored.get(block) != block_hash for block_hash, block in self._block_of.items()
        ):
            raise BlockError("the cached KV blocks and their hashes differ")
        if stray := self._idle.keys() - self._stored.keys():
            raise BlockError(f"KV block {min(stray)} waits for eviction and is not cached")
        return frozenset(self._idle)

    def cached(self) -> Set[int]:
        """Return all cached blocks."""
        return self._stored.keys()


_EVENT_CAPACITY: Final = 8192


class BlockPool:
    """Blocks 0 .. total - 1 of `block_size` tokens each. The padding block after them is not the pool's.

    A block is in use while it has references, one for each block table that names it. With `prefix_caching`
    a full block can be published: it can then be hit by other sequences, also after its last reference is
    gone, until its memory is needed. `events` tells which blocks can be hit.
    """

    def __init__(
        self,
        total: int,
        block_size: int,
        *,
        prefix_caching: bool = False,
        event_capacity: int = _EVENT_CAPACITY,
    ) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, not {total} blocks of {block_size}")
        self.total = total
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = FreeList(total)
        self._index = PrefixIndex(event_capacity)
        self._references = [0] * total
        self._used = 0
        self._highest = -1

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated: free ones and idle cached ones."""
        return self.total - self._used

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self._used

    @property
    def cached_count(self) -> int:
        """Number of cached blocks, in use or not."""
        return len(self._index)

    @property
    def highest_used(self) -> int:
        """Highest id in use, -1 if none is."""
        # Lowest ids go out first: every id passed here was freed since it was last passed.
        while self._highest >= 0 and not self._references[self._highest]:
            self._highest -= 1
        return self._highest

    @property
    def events(self) -> KvEventLog:
        """Changes of the prefix cache."""
        return self._index.events

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each: the lowest ids that hold nothing, rising.

        When those are out it evicts cached blocks, the least recently used first. Raises OutOfBlocks if
        all of that is not enough, and then allocates none.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.free_count:
            raise OutOfBlocks(count, self.free_count)
        ids = self._free.take(min(count, len(self._free)))
        ids += [self._index.evict() for _ in range(count - len(ids))]
        for block in ids:
            self._references[block] = 1
        self._used += count
        self._highest = max(self._highest, *ids, -1)
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Take one reference from each block. A cached one can still be hit when its last is gone.

        `ids` are in the order of a block table: its later blocks are evicted before its earlier ones. If
        one is not in use or named twice: BlockError, and none is freed.
        """
        if len(set(ids)) != len(ids):
            raise BlockError("a KV block is named twice in one free")
        for block in ids:
            self._check_exists(block)
            if not self._references[block]:
                raise BlockError(f"KV block {block} was freed twice")
        for block in reversed(ids):
            self._references[block] -= 1
            if not self._references[block]:
                self._used -= 1
                if not self._index.rest(block):
                    self._free.put(block)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, without a reference: see `acquire`.

        A sequence needs the logits after its last token, so it looks up only the blocks before that token.
        """
        return self._index.lookup(hashes)

    def references(self, block: int) -> int:
        """Return how many block tables name this block."""
        return self._references[block]

    def idle(self, ids: Iterable[int]) -> int:
        """Return how many of these blocks are idle: `free_count` falls by so much when they are acquired."""
        return sum(not self._references[block] for block in ids)

    def acquire(self, ids: Sequence[int]) -> None:
        """Add a reference to each of the blocks that `lookup` just returned. They must not be written to.

        Raises BlockError if one is not cached, and then adds none.
        """
        for block in ids:
            if block not in self._index:
                raise BlockError(f"KV block {block} is not cached")
        for block in ids:
            if not self._references[block]:
                self._index.wake(block)
                self._used += 1
                self._highest = max(self._highest, block)
            self._references[block] += 1

    def share(self, ids: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are in use. Shared slots must not be written to.

        Raises BlockError if one is not in use, and then adds none.
        """
        for block in ids:
            self._check_exists(block)
            if not self._references[block]:
                raise BlockError(f"KV block {block} is not in use and cannot be shared")
        for block in ids:
            self._references[block] += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Cache a block in use whose KV is computed in full, by the hash of its tokens.

        If another block is cached by this hash, this one is left as it is. Nothing happens without prefix
        caching. Raises BlockError for a block that is not in use, or cached by another hash.
        """
        if not self.prefix_caching:
            return
        self._check_exists(block)
        if not self._references[block]:
            raise BlockError(f"KV block {block} is not in use and cannot be published")
        self._index.add(block, block_hash)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop these blocks from the cache: their contents are not to be trusted."""
        for block in ids:
            if self._index.forget(block):
                self._free.put(block)

    def clear_cache(self) -> int:
        """Drop all blocks from the cache, and return how many there were. Blocks in use stay in use."""
        count = len(self._index)
        for block in self._index.clear():
            self._free.put(block)
        return count

    def plan_moves(self, limit: int) -> list[BlockMove]:
        """Move up to `limit` of the highest blocks in use into the lowest free ones, while that pays.

        The pool has done so when this returns. The caller copies the KV before anything else touches it and
        rewrites the block tables. Raises BlockError with prefix caching, whose hits are fetched by id.
        """
        if self.prefix_caching:
            raise BlockError("KV blocks are moved only without prefix caching")
        moves: list[BlockMove] = []
        while len(moves) < limit and worth_moving(self.highest_used, self._used):
            source, (target,) = self.highest_used, self._free.take(1)
            self._references[target], self._references[source] = self._references[source], 0
            self._free.put(source)
            moves.append(BlockMove(source, target))
        return moves

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables of all users. Visits every block: for idle moments.

        Raises BlockError unless each block has as many references as there are tables that name it, and is
        either in use, or cached and idle, or free.
        """
        owners = [0] * self.total
        for table in tables:
            if len(set(table)) != len(table):
                raise BlockError("a block table names a KV block twice")
            if table:
                self._check_exists(min(table))
                self._check_exists(max(table))
            for block in table:
                owners[block] += 1
        if owners != self._references:
            block = next(i for i in range(self.total) if owners[i] != self._references[i])
            raise BlockError(
                f"KV block {block} has {self._references[block]} references and {owners[block]} users"
            )
        free, idle = self._free.check(), self._index.check()
        if not free.isdisjoint(self._index.cached()):
            raise BlockError("a KV block is cached and free")
        if any(self._references[block] for ids in (free, idle) for block in ids):
            raise BlockError("a KV block is in use, and free or idle")
        if self._used != self.total - len(free) - len(idle) or self._used != self.total - owners.count(0):
            raise BlockError("KV blocks in use, idle and free do not add up to the pool")

    def _check_exists(self, block: int) -> None:
        if not 0 <= block < self.total:
            raise BlockError(f"KV block {block} does not exist; the pool has {self.total}")
