"""Waiting and running sequences, in the orders in which they are served."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Final

from services.engine.scheduler.sequence import SchedulerError, Sequence, SequenceStatus


class OrderedSequences:
    """Sequences by a unique key, which must not change while they are in.

    Made for a few thousand: an insertion moves pointers in memory, which is faster there than any tree.
    """

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._key = key
        self._sorted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sorted)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sorted)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._sorted, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in."""
        del self._sorted[bisect_left(self._sorted, self._key(sequence), key=self._key)]

    def first(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences with the lowest keys, rising."""
        return list(islice(self._sorted, count))

    def last(self) -> Sequence | None:
        """Return the sequence with the highest key."""
        return self._sorted[-1] if self._sorted else None


# Below so many entries a queue is not worth cleaning up.
_FEW: Final = 64


class WaitingQueue:
    """Waiting sequences by `order`, preempted and new ones alike. Operations are O(log n), amortised.

    Held sequences count as waiting, and come up only after their release. A sequence that ends while it
    waits stays in the heap as a dead entry until it comes up or half of the entries are dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._length = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence that is new or was preempted."""
        self.hold(sequence)
        self.release(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take in a sequence that cannot run yet."""
        self._length += 1
        self.tokens += len(sequence.token_ids)

    def release(self, sequence: Sequence) -> None:
        """Queue a sequence that was held."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """Return the sequence that is to run next."""
        while self._heap:
            sequence = self._heap[0][1]
            if not sequence.finished:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self, head: Sequence) -> None:
        """Take out the sequence that `head` returned."""
        heapq.heappop(self._heap)
        self._forget(head)

    def leave(self, sequence: Sequence) -> None:
        """Take out a sequence that is held."""
        self._forget(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Drop a sequence that has just ended, wherever it stands."""
        self._forget(sequence)
        if len(self._heap) > max(_FEW, 2 * self._length):
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)

    def _forget(self, sequence: Sequence) -> None:
        self._length -= 1
        self.tokens -= len(sequence.token_ids)


class RunningSet:
    """Running sequences, by `order` and by what a step can do for them.

    `prefilling` have more than one token to compute; they take turns. `decoding` have one; they hold
    `decode_blocks` blocks, a shared one counted for each, and `growing` are those of them that have no slot
    for it. `ending` reach their longest length with a step in flight: nothing is to be computed for
    them any more. `resting` are beams that wait for the others of their group. Every change is
    booked at once: a step need not look at all that run.
    """

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        # A sorted list is a heap.
        self._free_rows = list(range(max_num_seqs))
        self.by_order = OrderedSequences(attrgetter("order"))
        self.prefilling = OrderedSequences(attrgetter("turn"))
        self.decoding: dict[int, Sequence] = {}
        self.growing: dict[int, Sequence] = {}
        self.decode_blocks = 0
        self.ending: dict[int, Sequence] = {}
        self.resting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.by_order)

    @property
    def free_rows(self) -> int:
        """How many more sequences may run."""
        return len(self._free_rows)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that prefill has yet to compute."""
        return sum(sequence.num_uncomputed_tokens for sequence in self.prefilling)

    def add(self, sequence: Sequence, end: int, turn: tuple[int, int]) -> None:
        """Take in a sequence that was just admitted and whose first chunk ends before `end`."""
        self._enter(sequence)
        self._book(sequence, end, turn)

    def add_resting(self, sequence: Sequence) -> None:
        """Take in a beam for which nothing is to be computed yet."""
        self._enter(sequence)
        self.resting[sequence.key] = sequence

    def rest(self, sequence: Sequence) -> None:
        """Note that the next token of a `decoding` beam is planned."""
        self._leave_decoding(sequence)
        self.resting[sequence.key] = sequence

    def wake(self, sequence: Sequence, turn: tuple[int, int]) -> None:
        """Move a `resting` beam on to compute the tokens that it has."""
        del self.resting[sequence.key]
        self._book(sequence, sequence.num_computed_tokens, turn)

    def book_chunk(self, sequence: Sequence, end: int, turn: tuple[int, int]) -> None:
        """Book a further chunk, which ends before `end`, of a `prefilling` sequence."""
        self.prefilling.remove(sequence)
        self._book(sequence, end, turn)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands, and free its row."""
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1
        self.by_order.remove(sequence)
        if sequence.key in self.decoding:
            self._leave_decoding(sequence)
        elif not (self.ending.pop(sequence.key, None) or self.resting.pop(sequence.key, None)):
            self.prefilling.remove(sequence)

    def grow(self, sequence: Sequence, block: int) -> None:
        """Give a `growing` sequence one more block."""
        sequence.add_block(block)
        self.decode_blocks += 1
        del self.growing[sequence.key]

    def own(self, sequence: Sequence, block: int) -> int:
        """Give a `growing` sequence a block of its own for the one that it shares, which is returned."""
        del self.growing[sequence.key]
        return sequence.own_last(block)

    def end(self, sequence: Sequence) -> None:
        """Note that the last token of a `decoding` sequence is planned."""
        self._leave_decoding(sequence)
        self.ending[sequence.key] = sequence

    def check(self) -> None:
        """Compare the books. Raises SchedulerError."""
        parts = [*self.prefilling, *self.decoding.values(), *self.ending.values(), *self.resting.values()]
        if sorted(part.key for part in parts) != sorted(sequence.key for sequence in self.by_order):
            raise SchedulerError("what runs is not what computes a prompt, decodes, ends or rests")
        decoding = self.decoding.values()
        growing = [sequence.key for sequence in decoding if self._grows(sequence)]
        if sorted(growing) != sorted(self.growing):
            raise SchedulerError("the sequences that grow are not those that decode without a slot")
        if self.decode_blocks != sum(len(sequence.block_table) for sequence in decoding):
            raise SchedulerError("the blocks of the decoding sequences do not add up")
        rows = [*self._free_rows, *(sequence.row for sequence in self.by_order)]
        if sorted(rows) != list(range(self._max_num_seqs)):
            raise SchedulerError("the rows of the running sequences are not each their own")
        for sequence in self.by_order:
            if sequence.status is not SequenceStatus.RUNNING:
                raise SchedulerError(f"sequence {sequence.key} runs and is {sequence.status.value}")

    def _book(self, sequence: Sequence, end: int, turn: tuple[int, int]) -> None:
        sequence.num_computed_tokens = end
        length = len(sequence.token_ids)
        if end == length:
            # The chunk samples, so the next token is known to come.
            sequence.num_pending += 1
            length += 1
            if sequence.group is not None:
                self.resting[sequence.key] = sequence
                return
        if length - end > 1:
            sequence.turn = turn
            self.prefilling.add(sequence)
        elif length < sequence.longest:
            self.decoding[sequence.key] = sequence
            self.decode_blocks += len(sequence.block_table)
            if self._grows(sequence):
                self.growing[sequence.key] = sequence
        else:
            self.ending[sequence.key] = sequence

    def _enter(self, sequence: Sequence) -> None:
        sequence.row = heapq.heappop(self._free_rows)
        self.by_order.add(sequence)

    def _grows(self, sequence: Sequence) -> bool:
        end = len(sequence.block_table) * self._block_size
        return sequence.num_computed_tokens == end or sequence.shares_last

    def _leave_decoding(self, sequence: Sequence) -> None:
        del self.decoding[sequence.key]
        self.growing.pop(sequence.key, None)
        self.decode_blocks -= len(sequence.block_table)
