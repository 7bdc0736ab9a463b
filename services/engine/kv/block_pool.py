"""The pool of KV blocks. Which block belongs to whom is the callers' business."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from services.engine.kv.errors import BlockError, OutOfBlocks


class BlockPool:
    """Blocks 0 .. total - 1 of `block_size` tokens each. The padding block after them is not the pool's.

    The lowest free ids go out first: what is in use stays near the start of the cache.
    """

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, not {total} blocks of {block_size}")
        self.total = total
        self.block_size = block_size
        # A sorted list is a heap.
        self._free = list(range(total))
        self._in_use = bytearray(total)

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that are allocated."""
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Returns the `count` lowest free ids, rising. Raises OutOfBlocks and then allocates none."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        ids = [heapq.heappop(self._free) for _ in range(count)]
        for block in ids:
            self._in_use[block] = 1
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Takes blocks back. If one is not allocated or named twice: BlockError, and none is freed."""
        if len(set(ids)) != len(ids):
            raise BlockError("a KV block is named twice in one free")
        for block in ids:
            if not 0 <= block < self.total:
                raise BlockError(f"KV block {block} does not exist; the pool has {self.total}")
            if not self._in_use[block]:
                raise BlockError(f"KV block {block} was freed twice")
        for block in ids:
            self._in_use[block] = 0
            heapq.heappush(self._free, block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the books with the block tables of all users. It visits every block: for idle moments.

        Raises BlockError if a block has two users, is used while free, or is allocated without a user.
        """
        owned = bytearray(self.total)
        for table in tables:
            for block in table:
                if owned[block]:
                    raise BlockError(f"KV block {block} has two users")
                owned[block] = 1
        if owned != self._in_use:
            block = next(i for i in range(self.total) if owned[i] != self._in_use[i])
            raise BlockError(f"KV block {block} is " + ("used but free" if owned[block] else "leaked"))
        if len(set(self._free)) != len(self._free) or any(self._in_use[block] for block in self._free):
            raise BlockError("the list of free KV blocks does not match the allocated ones")
        if len(self._free) + sum(self._in_use) != self.total:
            raise BlockError("free and allocated KV blocks do not add up to the pool")
