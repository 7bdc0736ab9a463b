"""Which blocks can be hit by the hash of what they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

from services.engine.kv.errors import BlockError
from services.engine.kv.events import KvEventLog


class PrefixIndex:
    """Cached blocks by hash. Of those that no sequence uses, the one that is idle for longest goes first.

    Every operation on one block is O(1).
    """

    def __init__(self, event_capacity: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._stored: dict[int, bytes] = {}
        # Not a dict: the first key of a dict whose front was deleted is found in O(n).
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.events = KvEventLog(event_capacity, self._stored.values())

    def __len__(self) -> int:
        """Blocks that can be hit, in use or not."""
        return len(self._stored)

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is cached."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, block_hash: bytes) -> None:
        """Makes a block that is in use hittable, unless another one already is by this hash.

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
        """Notes that nobody uses the block now. False, noting nothing, if it is not cached."""
        if block not in self._stored:
            return False
        self._idle[block] = None
        return True

    def wake(self, block: int) -> None:
        """Notes that an idle block is used again."""
        del self._idle[block]

    def evict(self) -> int:
        """Gives up the block that is idle for longest, and returns it. There must be one."""
        block, _ = self._idle.popitem(last=False)
        self._remove(block)
        return block

    def forget(self, block: int) -> bool:
        """Gives up a block if it is cached. True if nobody used it."""
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
        """Gives up all blocks. Returns those that nobody uses."""
        idle = list(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._stored.clear()
        self.events.cleared()
        return idle

    def check(self) -> frozenset[int]:
        """Returns the idle blocks. Raises BlockError if the books differ."""
        stored = self._stored
        if len(stored) != len(self._block_of) or any(
            stored.get(block) != block_hash for block_hash, block in self._block_of.items()
        ):
            raise BlockError("the cached KV blocks and their hashes differ")
        if stray := self._idle.keys() - self._stored.keys():
            raise BlockError(f"KV block {min(stray)} waits for eviction and is not cached")
        return frozenset(self._idle)

    def cached(self) -> Set[int]:
        """All blocks that can be hit."""
        return self._stored.keys()
