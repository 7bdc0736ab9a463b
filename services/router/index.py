"""An index of engines' prefix caches by the names of blocks: which engines hold which block. Pure.

For millions of blocks and up to a thousand engines. An engine's KV events reach it by numbers, through gaps
and snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from struct import iter_unpack
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from catenary.blockhash import DIGEST_BYTES
from catenary.v1 import engine_pb2

# Up to so many engines are taken out of a set one by one; more are unpacked at once.
_FEW = 8


class Matches:
    """Engines by the number of blocks that they hold from a chain's start on.

    `steps`: sets of engines with their common number of blocks, which rises; an engine is in one of them at
    the most. A set is an integer with a bit for the slot of each engine, of which there are `slots`.
    """

    __slots__ = ("_slots", "_steps")

    def __init__(self, steps: Sequence[tuple[int, int]], slots: int) -> None:
        self._steps = steps
        self._slots = slots

    def __bool__(self) -> bool:
        return bool(self._steps)

    def blocks(self, slot: int) -> int:
        """Return the blocks of one slot; slot -1 holds nothing."""
        if slot >= 0:
            for engines, blocks in self._steps:
                if engines >> slot & 1:
                    return blocks
        return 0

    def by_slot(self) -> npt.NDArray[np.int64]:
        """Return blocks by slot as int64 [slots + 1]; the last one is 0, for slot -1, which holds nothing."""
        column = np.zeros(self._slots + 1, dtype=np.int64)
        for engines, blocks in self._steps:
            if engines.bit_count() <= _FEW:
                for slot in _few_slots(engines):
                    column[slot] = blocks
            else:
                column[:-1][_bits(engines, self._slots)] = blocks
        return column


def _few_slots(engines: int) -> Iterator[int]:
    while engines:
        lowest = engines & -engines
        yield lowest.bit_length() - 1
        engines ^= lowest


def _bits(engines: int, slots: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(engines.to_bytes((slots + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=slots, bitorder="little").view(np.bool_)


K = TypeVar("K", bound=Hashable)

# At the bound an engine gives up at least this share of what it has, so that the search for its oldest pairs,
# which passes the places of those given up before, is paid by many.
_LEAST_SHARE = 100


@dataclass(slots=True)
class _Holdings:
    """One engine: its bit in the sets of holders, and its blocks, longest known first."""

    slot: int
    bit: int
    names: dict[bytes, None] = field(default_factory=dict)
    # A snapshot came to its end, and whether all of it is still here.
    told: bool = False
    complete: bool = False


class KvIndex(Generic[K]):
    """Block name -> engines, and back. Engines are any hashable keys.

    A pair is one block of one engine. There are at most `max_pairs`: at the bound, the engine that has most
    gives up those that were stored longest ago, so that one engine that tells too much costs only itself.

    A set of holders is an integer with one bit an engine. Sets with one member, and those of blocks that were
    stored one after another, are shared objects: a pair costs about 140 bytes.
    """

    def __init__(self, max_pairs: int) -> None:
        """Raise ValueError for a bound below 1."""
        if max_pairs < 1:
            raise ValueError(f"an index holds at least one block, not {max_pairs}")
        self.max_pairs = max_pairs
        self._holders: dict[bytes, int] = {}
        self._holdings: dict[K, _Holdings] = {}
        self._slots = 0
        # Slots of engines that were forgotten.
        self._free: list[int] = []
        self._pairs = 0
        # Another one when `slot` or `known` would answer otherwise for some engine.
        self.version = 0

    @property
    def pairs(self) -> int:
        """Blocks known, counted once for each engine that holds them."""
        return self._pairs

    @property
    def engines(self) -> Collection[K]:
        """Engines that have a slot."""
        return self._holdings.keys()

    def slot(self, engine: K) -> int:
        """Return the place of `engine` in `Matches.by_slot`, -1 without one."""
        holdings = self._holdings.get(engine)
        return -1 if holdings is None else holdings.slot

    def blocks(self, engine: K) -> int:
        """Return how many blocks of `engine` are known."""
        holdings = self._holdings.get(engine)
        return 0 if holdings is None else len(holdings.names)

    def complete(self, engine: K) -> bool:
        """Whether these are all that it holds: `completed` was told, and nothing was given up since."""
        holdings = self._holdings.get(engine)
        return holdings is not None and holdings.complete

    def completed(self, engine: K) -> None:
        """Take the blocks of `engine` that are stored here as all that it holds."""
        holdings = self._of(engine)
        holdings.told = holdings.complete = True
        self.version += 1

    def known(self, engine: K) -> bool:
        """Whether `engine` tells what it holds, even if the index has dropped some of it."""
        holdings = self._holdings.get(engine)
        return holdings is not None and holdings.told

    def stored(self, engine: K, names: Iterable[bytes]) -> None:
        """Add blocks that `engine` holds. Those known before become its youngest."""
        holdings = self._of(engine)
        own, bit, holders = holdings.names, holdings.bit, self._holders
        count = len(own)
        # Blocks of one chain mostly have the same holders: their new set is made once and shared.
        before, after = 0, bit
        for name in names:
            if name in own:
                del own[name]
                own[name] = None
                continue
            own[name] = None
            held = holders.get(name, 0)
            if held is not before:
                before, after = held, (held | bit if held else bit)
            holders[name] = after
        self._pairs += len(own) - count
        while self._pairs > self.max_pairs:
            self._give_up()

    def keep_youngest(self, engine: K, count: int) -> None:
        """Take from `engine` what was stored longest ago until it has at most `count` blocks."""
        holdings = self._holdings.get(engine)
        if holdings is not None and len(holdings.names) > count:
            excess = max(len(holdings.names) - count, len(holdings.names) // _LEAST_SHARE)
            self._remove(holdings, list(islice(holdings.names, excess)))

    def removed(self, engine: K, names: Iterable[bytes]) -> None:
        """Remove blocks of `engine`. Those that are not known are passed over."""
        holdings = self._holdings.get(engine)
        if holdings is not None:
            self._remove(holdings, names)

    def cleared(self, engine: K) -> None:
        """Remove all blocks of `engine`."""
        holdings = self._holdings.get(engine)
        if holdings is not None:
            names, holdings.names = holdings.names, {}
            self._unhold(holdings.bit, names)
            self._pairs -= len(names)

    def replace(self, engine: K, names: Iterable[bytes]) -> None:
        """Take these blocks for all that `engine` holds."""
        self.cleared(engine)
        self.stored(engine, names)
        self.completed(engine)

    def forget(self, engine: K) -> None:
        """Forget `engine`. Idempotent."""
        self.cleared(engine)
        holdings = self._holdings.pop(engine, None)
        if holdings is not None:
            self._free.append(holdings.slot)
            self.version += 1

    def incomplete(self, engine: K) -> None:
        """Forget the blocks of `engine` until it has told all of them again."""
        self.cleared(engine)
        holdings = self._of(engine)
        holdings.told = holdings.complete = False
        self.version += 1

    def walk(self, parts: Iterable[Sequence[bytes]]) -> Matches:
        """Engines that hold the first block of a chain, by how many they hold from there on.

        `parts`: the names of the chain in pieces, none of them empty. The last name of a piece is looked at
        first: an engine with it has the piece, since a cache gives up a chain from its end. So a piece is
        looked at name by name only where some engine's blocks end, and a gap inside of one of which an engine
        has the last block is not seen. Pieces are read up to the first that no engine left has all of.
        """
        steps: list[tuple[int, int]] = []
        get = self._holders.get
        alive, depth = 0, 0
        for part in parts:
            if not depth and not (alive := get(part[0], 0)):
                break
            if alive & get(part[-1], 0) == alive:
                depth += len(part)
                continue
            for name in part:
                still = alive & get(name, 0)
                if still != alive:
                    steps.append((alive ^ still, depth))
                    alive = still
                    if not alive:
                        break
                depth += 1
            if not alive:
                break
        if alive:
            steps.append((alive, depth))
        return Matches(steps, self._slots)

    def _of(self, engine: K) -> _Holdings:
        holdings = self._holdings.get(engine)
        if holdings is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._slots = self._slots, self._slots + 1
            holdings = self._holdings[engine] = _Holdings(slot, 1 << slot)
            self.version += 1
        return holdings

    def _give_up(self) -> None:
        most = max(self._holdings.values(), key=lambda holdings: len(holdings.names))
        most.complete = False
        count = max(self._pairs - self.max_pairs, len(most.names) // _LEAST_SHARE)
        self._remove(most, list(islice(most.names, count)))

    def _remove(self, holdings: _Holdings, names: Iterable[bytes]) -> None:
        own, bit = holdings.names, holdings.bit
        count = len(own)
        self._unhold(bit, [name for name in names if own.pop(name, bit) is None])
        self._pairs -= count - len(own)

    def _unhold(self, bit: int, names: Iterable[bytes]) -> None:
        """Take `bit` out of the holders of `names`, which all have it."""
        holders = self._holders
        for name in names:
            held = holders[name]
            if held == bit:
                del holders[name]
            else:
                holders[name] = held ^ bit


# Digests of blocks in one message of an engine, which cuts its snapshots well below that.
MAX_NAMES = 65_536


class MalformedKv(ValueError):
    """An engine broke the contract of KvChanges or KvSnapshot: the stream ends."""


class _State(Enum):
    # Nothing is known; changes count for nothing until a snapshot begins.
    UNKNOWN = 1
    # Inside of a snapshot.
    PARTIAL = 2
    # The index has the cache as it was after the last number.
    SYNCED = 3


class KvFeed(Generic[K]):
    """Follows one attachment of an engine. A snapshot comes first, then the changes after it.

    With a gap, what the index has of the engine goes: a prefix that is not there costs more than a look that
    finds nothing.
    """

    def __init__(self, index: KvIndex[K], engine: K) -> None:
        self._index = index
        self._engine = engine
        self._state = _State.UNKNOWN
        self._number = 0

    @property
    def last_number(self) -> int:
        """Number of the last change that the index has; 0 before the first snapshot."""
        return self._number

    def snapshot(self, part: engine_pb2.KvSnapshot) -> bool:
        """Take a part of a snapshot. Returns whether another snapshot must be asked for.

        Raises:
            MalformedKv: the names are not whole, or too many for one message.
        """
        names = list(_names(part.names))
        if part.first:
            self._index.incomplete(self._engine)
            self._number, self._state = part.number, _State.PARTIAL
        elif self._state is _State.UNKNOWN:
            # The rest of one that was given up.
            return False
        elif self._state is _State.SYNCED or part.number != self._number:
            return self._gap()
        self._index.stored(self._engine, names)
        if part.last:
            self._index.completed(self._engine)
            self._state = _State.SYNCED
        return False

    def changes(self, changes: engine_pb2.KvChanges) -> bool:
        """Take changes. Returns whether a snapshot must be asked for, which is said once for each gap.

        Those that the snapshot has already are passed over.

        Raises:
            MalformedKv: a change of no kind, or names as for `snapshot`.
        """
        if self._state is _State.UNKNOWN:
            return False
        if self._state is _State.PARTIAL or changes.first_number > self._number + 1:
            return self._gap()
        known = self._number + 1 - changes.first_number
        for change in changes.changes:
            kind = change.WhichOneof("kind")
            if kind == "cleared":
                if known < 1:
                    self._index.replace(self._engine, ())
                    self._number += 1
                known = max(0, known - 1)
                continue
            if kind is None:
                raise MalformedKv("a change of no kind")
            names = list(_names(change.stored.names if kind == "stored" else change.removed.names))
            new = names[known:]
            known = max(0, known - len(names))
            apply = self._index.stored if kind == "stored" else self._index.removed
            apply(self._engine, new)
            self._number += len(new)
        return False

    def close(self) -> None:
        """Forget the engine, as its stream or attachment is over. Idempotent."""
        self._state = _State.UNKNOWN
        self._index.forget(self._engine)

    def _gap(self) -> bool:
        self._state = _State.UNKNOWN
        self._index.incomplete(self._engine)
        return True


def _names(packed: bytes) -> Iterator[bytes]:
    if len(packed) % DIGEST_BYTES:
        raise MalformedKv(f"names that are not {DIGEST_BYTES} bytes each")
    if len(packed) > MAX_NAMES * DIGEST_BYTES:
        raise MalformedKv(f"more than {MAX_NAMES} names in one message")
    return (name for (name,) in iter_unpack(f"{DIGEST_BYTES}s", packed))
