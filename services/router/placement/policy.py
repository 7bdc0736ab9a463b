"""The interface of a placement policy: request, candidates with their caches, choice; and the registry."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, TypeVar, overload
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from catenary.blockhash import BlockHashes
from catenary.v1 import common_pb2
from services.router.admission import sequences_of
from services.router.fleet import Engine, EngineColumns
from services.router.index import KvIndex

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Blocks that are named at once: a look-up that misses at the first block has not named them all.
_AHEAD = 16


class BlockNames(Sequence[bytes]):
    """The names of a prompt's full blocks, made as far as they are read and kept.

    Most look-ups end long before the prompt does, and a name costs about a microsecond.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
        self._token_ids = token_ids
        self._hashes = BlockHashes(block_size, salt)
        self._count = len(token_ids) // block_size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Return a name, or the list of some."""
        wanted = range(self._count)[index]
        if isinstance(wanted, range):
            self._reach(max(wanted, default=-1) + 1)
            return [self._hashes.hashes[each] for each in wanted]
        self._reach(wanted + 1)
        return self._hashes.hashes[wanted]

    def __iter__(self) -> Iterator[bytes]:
        self._reach(self._count)
        return iter(self._hashes.hashes)

    def parts(self) -> Iterator[list[bytes]]:
        """Yield the names in pieces, which are made when they are asked for."""
        made = self._hashes.hashes
        for start in range(0, self._count, _AHEAD):
            if len(made) <= start:
                self._reach(start + 1)
            yield made[start : start + _AHEAD]

    def _reach(self, count: int) -> None:
        """Make at least the first `count` names."""
        made = len(self._hashes.hashes)
        if made >= count:
            return
        size = self._hashes.block_size
        stop = min(self._count, -(-count // _AHEAD) * _AHEAD)
        self._hashes.extend(self._token_ids[made * size : stop * size])


class SplitPart(Enum):
    """The part of a sequence that an engine computes: all of it, its prompt, or what follows the prompt."""

    WHOLE = 1
    PROMPT = 2
    REST = 3


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """The facts for a policy: one object for all placements of a sequence, so blocks are named once.

    `token_ids`: the prompt's, `prompt_len` of them, and those that were emitted in earlier attempts. `salt`:
    of the block names. `session_id`: empty for none. `sequences`: as how many it counts. `prompt_engine`: of
    a sequence with the same prompt; the placer prefers it if it has room, and asks no policy then.
    `quarantined`: only an engine without work will do. `kv_tokens`: tokens of KV that it needs room for; 0
    for what keeps no KV. `queued_ms`: its wait, for the receipt.
    """

    request_id: str
    model: str
    token_ids: Sequence[int]
    prompt_len: int
    salt: bytes = b""
    session_id: str = ""
    sequences: int = 1
    prompt_engine: Engine | None = None
    quarantined: bool = False
    kv_tokens: int = 0
    queued_ms: int = 0
    # Set by the placer: how often it was placed, and the tokens that its engine probably has to compute.
    placements: int = 0
    uncached_tokens: int = 0
    # The part to place, if an engine can take it; and the part for which it was placed.
    part: SplitPart = SplitPart.WHOLE
    placed_part: SplitPart = SplitPart.WHOLE
    _names: dict[int, BlockNames] = field(default_factory=dict, init=False, repr=False)

    def names(self, block_size: int) -> BlockNames:
        """Return the names of the full blocks of `token_ids`, as an engine with this block size has them."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = BlockNames(self.token_ids, block_size, self.salt)
        return names


def placement_request(spec: common_pb2.SequenceSpec, *, quarantined: bool = False) -> PlacementRequest:
    """Return the request for placement of a valid sequence."""
    return PlacementRequest(
        request_id=spec.request_id,
        model=spec.model,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len if spec.HasField("prompt_len") else len(spec.token_ids),
        salt=spec.cache_salt.encode(),
        session_id=spec.session_id,
        sequences=sequences_of(spec),
        quarantined=quarantined,
        # One more than it has: nothing can be generated without room for it.
        kv_tokens=0 if spec.HasField("pooling") else len(spec.token_ids) + 1,
    )


@dataclass(frozen=True, slots=True)
class Matched:
    """Tokens of a prompt that each engine has cached, by row. `exact`: known from events."""

    tokens: Tokens
    exact: Mask


@dataclass(frozen=True, slots=True)
class _Rows:
    """The slots of a model's engines in the index, as long as that has this version."""

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
        self._rows: WeakKeyDictionary[EngineColumns, dict[bool, _Rows]] = WeakKeyDictionary()

    def told(self, request: PlacementRequest, columns: EngineColumns) -> Matched:
        """Return the tokens known from events: 0 for engines that tell nothing."""
        rows = self._placed(columns, exact=True)
        return Matched(self._tokens(request, columns, self._index, rows.slots), rows.told)

    def guessed(self, request: PlacementRequest, columns: EngineColumns) -> Matched:
        """Return the tokens guessed from what was sent."""
        rows = self._placed(columns, exact=False)
        return Matched(
            self._tokens(request, columns, self._memory, rows.slots), np.zeros(len(columns), np.bool_)
        )

    def best(self, request: PlacementRequest, columns: EngineColumns) -> Matched:
        """Return the tokens known from events, or guessed for engines that tell nothing."""
        if len(columns) == 1:
            return self._best_of_one(request, columns.engines[0])
        told = self.told(request, columns)
        if told.exact.all():
            return told
        guessed = self.guessed(request, columns)
        return Matched(np.where(told.exact, told.tokens, guessed.tokens), told.exact)

    def tells(self, engine: Engine) -> bool:
        """Whether `engine` tells what it has cached."""
        return self._index.known(engine)

    def sent(self, request: PlacementRequest, engine: Engine) -> None:
        """Remember the request's blocks as sent to `engine`."""
        self._memory.stored(engine, request.names(engine.capacity.block_size))
        self._memory.keep_youngest(engine, engine.capacity.total_blocks)

    def forget(self, engine: Engine) -> None:
        """Forget an engine that left."""
        self._index.forget(engine)
        self._memory.forget(engine)

    def _best_of_one(self, request: PlacementRequest, engine: Engine) -> Matched:
        exact = self._index.known(engine)
        index = self._index if exact else self._memory
        size = engine.capacity.block_size
        blocks = index.walk(request.names(size).parts()).blocks(index.slot(engine))
        return Matched(np.array([min(blocks * size, len(request.token_ids) - 1)]), np.array([exact]))

    def _placed(self, columns: EngineColumns, *, exact: bool) -> _Rows:
        index = self._index if exact else self._memory
        cached = self._rows.setdefault(columns, {})
        rows = cached.get(exact)
        if rows is None or rows.version != index.version:
            slots = np.array([index.slot(engine) for engine in columns.engines], dtype=np.int64)
            told = np.array([index.known(engine) for engine in columns.engines], dtype=np.bool_)
            rows = cached[exact] = _Rows(index.version, slots, told)
        return rows

    def _tokens(
        self, request: PlacementRequest, columns: EngineColumns, index: KvIndex[Engine], slots: Tokens
    ) -> Tokens:
        tokens = np.zeros(len(columns), dtype=np.int64)
        for size in columns.block_sizes:
            matches = index.walk(request.names(size).parts())
            if matches:
                found = matches.by_slot()[slots] * size
                alike = len(columns.block_sizes) == 1
                tokens = found if alike else np.where(columns.block_size == size, found, tokens)
        # The last token is always computed, for its output.
        return np.minimum(tokens, len(request.token_ids) - 1)


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


@dataclass(slots=True, eq=False, repr=False)
class Candidates:
    """Engines that serve the model, have room, and may be given the request: one or more rows of columns.

    A policy works on columns over these rows, `candidates.of(columns.sequences)`, and returns a position in
    them. `now`: seconds of the placer's clock. `same_prompt`: the one engine has the prompt. `looked`: the
    last result of `matched`, `told` or `guessed`, for the receipt.
    """

    columns: EngineColumns
    rows: Rows
    request: PlacementRequest
    prefixes: Prefixes
    now: float
    same_prompt: bool = field(default=False, kw_only=True)
    looked: Matched | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return a column for the candidates alone. Not to be written to."""
        return column if len(self.rows) == len(column) else column[self.rows]

    def engine(self, position: int) -> Engine:
        return self.columns.engines[int(self.rows[position])]

    def position(self, epoch: int) -> int | None:
        """Return the position of the attachment with this epoch, or None."""
        row = self.columns.row_of(epoch)
        if row is None:
            return None
        position = int(np.searchsorted(self.rows, row))
        return position if position < len(self.rows) and self.rows[position] == row else None

    def matched(self) -> Matched:
        """Return the tokens of the request that the candidates have cached, known or guessed."""
        return self._keep(self.prefixes.best(self.request, self.columns))

    def told(self) -> Matched:
        """Return the tokens known from events."""
        return self._keep(self.prefixes.told(self.request, self.columns))

    def guessed(self) -> Matched:
        """Return the tokens guessed from what was sent."""
        return self._keep(self.prefixes.guessed(self.request, self.columns))

    def _keep(self, found: Matched) -> Matched:
        self.looked = looked = Matched(self.of(found.tokens), self.of(found.exact))
        return looked


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
    """Return a policy of this name. Raises KeyError for an unknown one."""
    return POLICIES[name](rng, options)


def load(candidates: Candidates) -> Floats:
    """Share of an engine's running slots taken plus share of its KV taken; 0 is idle.

    Both count what others placed by the last report and what this router has placed by now. They are shares,
    not counts, so that unequal engines fill up alike.
    """
    columns, of = candidates.columns, candidates.of
    shares: Floats = of(columns.sequences) / of(columns.slots)
    shares += of(columns.tokens) / of(columns.kv_tokens)
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
    sequences = candidates.of(candidates.columns.sequences)
    mean = float(sequences.sum()) / len(sequences)
    above: npt.NDArray[np.bool_] = sequences > max(mean * options.skew_ratio, mean + options.skew_sequences)
    return above
