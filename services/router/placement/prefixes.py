"""How much of a prompt each engine has cached: told by its events, or guessed from what it was sent."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from services.router.fleet import Board, Engine
from services.router.index import KvIndex
from services.router.placement.request import PlacementRequest

Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Matched:
    """Tokens of a prompt that each row of a board has cached. `exact`: the engine tells what it has."""

    tokens: Tokens
    exact: Mask


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where a board's engines are in the index, while that is of this version."""

    version: int
    slots: Tokens
    told: Mask


class Prefixes:
    """The known contents of engines' prefix caches.

    `index` holds what engines tell by PublishKv. Of an engine that tells nothing, or from which a snapshot is
    awaited, `sent` is remembered: as many of the blocks last sent there as its KV has room for.
    """

    def __init__(self, index: KvIndex[Engine], *, max_remembered: int) -> None:
        self._index = index
        self._memory: KvIndex[Engine] = KvIndex(max_remembered)
        self._rows: WeakKeyDictionary[Board, dict[bool, _Rows]] = WeakKeyDictionary()

    def told(self, request: PlacementRequest, board: Board) -> Matched:
        """By events alone: 0 for engines that tell nothing."""
        rows = self._placed(board, exact=True)
        return Matched(self._tokens(request, board, self._index, rows.slots), rows.told)

    def guessed(self, request: PlacementRequest, board: Board) -> Matched:
        """By memory alone."""
        rows = self._placed(board, exact=False)
        return Matched(self._tokens(request, board, self._memory, rows.slots), np.zeros(len(board), np.bool_))

    def best(self, request: PlacementRequest, board: Board) -> Matched:
        """By events where there are any, else by memory."""
        if len(board) == 1:
            return self._best_of_one(request, board.engines[0])
        told = self.told(request, board)
        if told.exact.all():
            return told
        guessed = self.guessed(request, board)
        return Matched(np.where(told.exact, told.tokens, guessed.tokens), told.exact)

    def tells(self, engine: Engine) -> bool:
        """Whether `engine` tells what it has cached."""
        return self._index.known(engine)

    def sent(self, request: PlacementRequest, engine: Engine) -> None:
        """`engine` will have the request's blocks."""
        self._memory.stored(engine, request.names(engine.capacity.block_size))
        self._memory.keep_youngest(engine, engine.capacity.total_blocks)

    def forget(self, engine: Engine) -> None:
        """It left, and its cache with it."""
        self._index.forget(engine)
        self._memory.forget(engine)

    def _best_of_one(self, request: PlacementRequest, engine: Engine) -> Matched:
        exact = self._index.known(engine)
        index = self._index if exact else self._memory
        size = engine.capacity.block_size
        blocks = index.walk(request.names(size).parts()).blocks(index.slot(engine))
        return Matched(np.array([min(blocks * size, len(request.token_ids) - 1)]), np.array([exact]))

    def _placed(self, board: Board, *, exact: bool) -> _Rows:
        index = self._index if exact else self._memory
        cached = self._rows.setdefault(board, {})
        rows = cached.get(exact)
        if rows is None or rows.version != index.version:
            slots = np.array([index.slot(engine) for engine in board.engines], dtype=np.int64)
            told = np.array([index.known(engine) for engine in board.engines], dtype=np.bool_)
            rows = cached[exact] = _Rows(index.version, slots, told)
        return rows

    def _tokens(
        self, request: PlacementRequest, board: Board, index: KvIndex[Engine], slots: Tokens
    ) -> Tokens:
        tokens = np.zeros(len(board), dtype=np.int64)
        for size in board.block_sizes:
            matches = index.walk(request.names(size).parts())
            if matches:
                found = matches.by_slot()[slots] * size
                alike = len(board.block_sizes) == 1
                tokens = found if alike else np.where(board.block_size == size, found, tokens)
        # The last token is always computed: its output is what is wanted.
        return np.minimum(tokens, len(request.token_ids) - 1)
