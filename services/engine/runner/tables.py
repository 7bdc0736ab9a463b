"""Block tables of the running sequences as one array, so that a step's inputs are computed and not listed."""

from __future__ import annotations

import numpy as np

from services.engine.runner.staging import Ints
from services.engine.scheduler import Sequence

_FIRST_WIDTH = 16


class BlockTables:
    """Row `sequence.row` holds the first blocks of the table of the sequence that has the row now.

    A table list only grows, and another list takes its place when a sequence gets other blocks: so an update
    copies what is new.
    """

    def __init__(self, rows: int) -> None:
        self.ids: Ints = np.zeros((rows, _FIRST_WIDTH), dtype=np.int64)
        self._tables: list[list[int] | None] = [None] * rows
        self._known = [0] * rows

    def update(self, sequence: Sequence, count: int) -> None:
        """Makes the first `count` blocks of the sequence's table known."""
        row, table = sequence.row, sequence.block_table
        if self._tables[row] is not table:
            self._tables[row] = table
            self._known[row] = 0
        known = self._known[row]
        if known < count:
            while count > self.ids.shape[1]:
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)), axis=1)
            self.ids[row, known:count] = table[known:count]
            self._known[row] = count
