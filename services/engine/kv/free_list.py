"""The ids of blocks that hold nothing."""

from __future__ import annotations

import heapq
import operator

from services.engine.kv.errors import BlockError


class FreeList:
    """Gives out the lowest id first, so that what is in use stays near the start of the cache."""

    def __init__(self, total: int) -> None:
        """Starts with the ids 0 .. total - 1."""
        # A sorted list is a heap.
        self._heap = list(range(total))

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, count: int) -> list[int]:
        """Takes the `count` lowest ids, rising. There must be as many."""
        return [heapq.heappop(self._heap) for _ in range(count)]

    def put(self, block: int) -> None:
        """Takes an id back."""
        heapq.heappush(self._heap, block)

    def check(self) -> frozenset[int]:
        """Returns all ids. Raises BlockError if one is there twice or they are not a heap."""
        ids = frozenset(self._heap)
        if len(ids) != len(self._heap):
            raise BlockError("the list of free KV blocks names one twice")
        # The children of i are 2i + 1 and 2i + 2.
        heap, children = self._heap, (self._heap[1::2], self._heap[2::2])
        if not all(all(map(operator.le, heap, some)) for some in children):
            raise BlockError("the list of free KV blocks is out of order")
        return ids
