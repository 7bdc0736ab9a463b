"""The queue of sequences that have no blocks."""

from __future__ import annotations

from collections import OrderedDict

from services.engine.scheduler.sequence import Sequence


class WaitingQueue:
    """First come, first served, with a way back to the head for the preempted. Every operation is O(1)."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._sequences[sequence.key] = sequence
        self.tokens += len(sequence.token_ids)

    def push_front(self, sequence: Sequence) -> None:
        """Queues a preempted sequence, which is older than all that wait."""
        self.append(sequence)
        self._sequences.move_to_end(sequence.key, last=False)

    def head(self) -> Sequence | None:
        """The sequence that runs next."""
        return next(iter(self._sequences.values()), None)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        del self._sequences[sequence.key]
        self.tokens -= len(sequence.token_ids)
