"""The queue of sequences that have no blocks."""

from __future__ import annotations

import heapq
from typing import Final

from services.engine.scheduler.sequence import Sequence

# Below so many entries a queue is not worth cleaning up.
_FEW: Final = 64


class WaitingQueue:
    """Sequences by `order`, the preempted among the new ones. Every operation is O(log n), amortised.

    Those that are held are counted and do not come up before they are released.

    One that ends while it waits stays in the heap as a dead entry until it comes up or the dead are half.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._length = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that is new or was preempted."""
        self.hold(sequence)
        self.release(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Takes in a sequence that cannot run yet."""
        self._length += 1
        self.tokens += len(sequence.token_ids)

    def release(self, sequence: Sequence) -> None:
        """Queues a sequence that was held."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The sequence that runs next."""
        while self._heap:
            sequence = self._heap[0][1]
            if not sequence.finished:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self, head: Sequence) -> None:
        """Takes out the sequence that `head` returned."""
        heapq.heappop(self._heap)
        self._forget(head)

    def leave(self, sequence: Sequence) -> None:
        """Takes out a sequence that is held."""
        self._forget(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Drops a sequence that has just ended, wherever it stands."""
        self._forget(sequence)
        if len(self._heap) > max(_FEW, 2 * self._length):
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)

    def _forget(self, sequence: Sequence) -> None:
        self._length -= 1
        self.tokens -= len(sequence.token_ids)
