"""The engines that a policy may choose from, and how it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.router.fleet import Board, Engine
from services.router.placement.prefixes import Matched, Prefixes
from services.router.placement.request import PlacementRequest

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


class Candidates:
    """Rows of a board, at least one: engines that serve the model, have room, and may be given the request.

    A policy works on columns over these rows: `candidates.of(board.sequences)`. What it returns is a
    position in them. `now`: seconds of the placer's clock. `beside`: it is the one that has the same prompt.
    """

    __slots__ = ("_matched", "_prefixes", "_request", "beside", "board", "now", "rows")

    def __init__(
        self,
        board: Board,
        rows: Rows,
        request: PlacementRequest,
        prefixes: Prefixes,
        now: float,
        *,
        beside: bool = False,
    ) -> None:
        self.board = board
        self.rows = rows
        self.now = now
        self.beside = beside
        self._request = request
        self._prefixes = prefixes
        self._matched: Matched | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """A column of the board, for the candidates alone. Not to be written to."""
        return column if len(self.rows) == len(column) else column[self.rows]

    def engine(self, position: int) -> Engine:
        """The engine at a position."""
        return self.board.engines[int(self.rows[position])]

    def position(self, epoch: int) -> int | None:
        """Where the attachment with this epoch is among them; None if it is not."""
        row = self.board.row_of(epoch)
        if row is None:
            return None
        position = int(np.searchsorted(self.rows, row))
        return position if position < len(self.rows) and self.rows[position] == row else None

    @property
    def looked(self) -> Matched | None:
        """The last result of `matched`, `told` or `guessed`, for the receipt; None without a look-up."""
        return self._matched

    def matched(self) -> Matched:
        """Tokens of the request that they have cached, known or guessed."""
        return self._keep(self._prefixes.best(self._request, self.board))

    def told(self) -> Matched:
        """The same, known only."""
        return self._keep(self._prefixes.told(self._request, self.board))

    def guessed(self) -> Matched:
        """The same, guessed only."""
        return self._keep(self._prefixes.guessed(self._request, self.board))

    def _keep(self, found: Matched) -> Matched:
        self._matched = Matched(self.of(found.tokens), self.of(found.exact))
        return self._matched


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: a position among the candidates, and why in a word.

    `scores`: what it gave to each candidate, lower is better; None if it compared no numbers.
    """

    position: int
    reason: str
    scores: Floats | None = None
