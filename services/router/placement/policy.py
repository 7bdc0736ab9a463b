"""The interface of a placement policy: its candidates, its answer, its options, and the table of policies.

The numbers that several policies share are here too: loads as columns, and draws among the lowest.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from services.router.fleet import Board, Engine
from services.router.placement.prefixes import Matched, Prefixes
from services.router.placement.request import PlacementRequest


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Numbers of the policies; the router's options of the same names describe them.

    `min_match`, `skew_sequences` and `skew_ratio` are the bounds that SGLang's gateway uses for its
    cache-aware policy, `load_factor` is that of its bounded hashing.
    """

    min_match: float = 0.5
    skew_sequences: int = 32
    skew_ratio: float = 1.1
    load_factor: float = 1.25
    decode_weight: float = 0.125
    pressure_weight: float = 50.0
    stale_s: float = 2.0
    session_ttl_s: float = 7200.0
    max_sessions: int = 65_536


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


class Memory(Enum):
    """Of which engines a policy wants remembered what they were sent."""

    NONE = "none"
    # Of those that do not tell what they have cached.
    UNTOLD = "untold"
    ALL = "all"


class PlacementPolicy(ABC):
    """Chooses an engine for a sequence.

    A policy is asked on the event loop for every sequence: it neither blocks nor keeps anything that grows
    without a bound. Load is counted by others; a policy only reads it. Its randomness is the caller's, and
    its time is that of the candidates, so that a simulation can be repeated.
    """

    name: ClassVar[str]
    memory: ClassVar[Memory] = Memory.NONE

    def __init__(self, rng: random.Random, options: PlacementOptions | None = None) -> None:
        self._rng = rng
        self._options = options or PlacementOptions()

    @abstractmethod
    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """Choose among the candidates, of which there is at least one."""


POLICIES: dict[str, type[PlacementPolicy]] = {}

_Policy = TypeVar("_Policy", bound=type[PlacementPolicy])


def register(name: str) -> Callable[[_Policy], _Policy]:
    """Class decorator: make a policy available under the name that the option `placement` takes."""

    def add(policy: _Policy) -> _Policy:
        policy.name = name
        POLICIES[name] = policy
        return policy

    return add


def policy_named(name: str, rng: random.Random, options: PlacementOptions | None = None) -> PlacementPolicy:
    """The policy registered as `name`. Raises KeyError for an unknown one."""
    return POLICIES[name](rng, options)


def load(candidates: Candidates) -> Floats:
    """Share of an engine's running slots taken plus share of its KV taken; 0 is idle.

    Both count what others placed by the last report and what this router has placed by now. They are shares,
    not counts, so that unequal engines fill up alike.
    """
    board, of = candidates.board, candidates.of
    shares: Floats = of(board.sequences) / of(board.slots)
    shares += of(board.tokens) / of(board.kv_tokens)
    return shares


def lowest(scores: Floats, rng: random.Random) -> int:
    """Position of the lowest score, at random among equals, so that several routers do not herd."""
    best = np.flatnonzero(scores == scores.min())
    return int(best[0] if len(best) == 1 else best[rng.randrange(len(best))])


def overloaded(candidates: Candidates, options: PlacementOptions) -> npt.NDArray[np.bool_]:
    """Which of them have more sequences than the mean by the ratio and the number of the options.

    By the mean, not by the least: one engine that has just started does not make all others overloaded, and
    so does not attract all requests.
    """
    sequences = candidates.of(candidates.board.sequences)
    mean = float(sequences.sum()) / len(sequences)
    above: npt.NDArray[np.bool_] = sequences > max(mean * options.skew_ratio, mean + options.skew_sequences)
    return above
