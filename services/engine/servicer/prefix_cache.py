"""Names of cached KV blocks for the routers: what the core's cache holds, and changes that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Final

from catenary.blockhash import DIGEST_BYTES
from catenary.v1 import engine_pb2
from services.engine.link import KvChanges, KvContents
from services.engine.servicer.core import Core

# Names of one message: a router applies them in one turn of its loop.
_NAMES_A_MESSAGE: Final = 2048


class PrefixCacheDelta:
    """Net changes of cached block names that a router was not sent yet.

    At most `max_pending` names; with more a snapshot is due instead. `contents` returns all names, or None
    while the core has not told them: nothing is sent then. Changes are numbered per delta; a block that is
    stored and removed between two messages has no number.
    """

    def __init__(self, contents: Callable[[], Collection[bytes] | None], *, max_pending: int) -> None:
        self._contents = contents
        self._max_pending = max_pending
        self._number = 0
        self._renewed = True
        self._cleared = False
        # Whether a name was stored or removed, in order.
        self._pending: dict[bytes, bool] = {}
        self._wake = asyncio.Event()
        self._wake.set()

    def change(self, cleared: bool, removed: Collection[bytes], stored: Collection[bytes]) -> None:
        """Add changes: `cleared` came before the others."""
        if self._renewed:
            return
        if cleared:
            self._cleared = True
            self._pending.clear()
        for name in removed:
            self._add(name, stored=False)
        for name in stored:
            self._add(name, stored=True)
        if len(self._pending) > self._max_pending:
            self.renew()
        else:
            self._wake.set()

    def renew(self) -> None:
        """Send all there is, as soon as it is known, in place of what waits."""
        self._renewed, self._cleared = True, False
        self._pending.clear()
        self._wake.set()

    async def ready(self) -> None:
        """Wait until there may be something to take."""
        await self._wake.wait()

    def take(self) -> list[engine_pb2.PublishKvRequest]:
        """Return the messages that are due."""
        self._wake.clear()
        if not self._renewed:
            return list(self._changes())
        names = self._contents()
        if names is None:
            return []
        self._renewed = False
        return list(self._snapshot(names))

    def _add(self, name: bytes, *, stored: bool) -> None:
        # A name comes and goes by turns, so two changes of it are none.
        if self._pending.pop(name, None) is None:
            self._pending[name] = stored

    def _snapshot(self, names: Collection[bytes]) -> Iterator[engine_pb2.PublishKvRequest]:
        parts = [b"".join(part) for part in _batches(list(names))] or [b""]
        for index, part in enumerate(parts):
            snapshot = engine_pb2.KvSnapshot(
                number=self._number, names=part, first=index == 0, last=index == len(parts) - 1
            )
            yield engine_pb2.PublishKvRequest(snapshot=snapshot)

    def _changes(self) -> Iterator[engine_pb2.PublishKvRequest]:
        if self._cleared:
            yield self._message(engine_pb2.KvChange(cleared=True), 1)
        for stored in (False, True):
            names = [name for name, kind in self._pending.items() if kind is stored]
            for part in _batches(names):
                joined = engine_pb2.KvNames(names=b"".join(part))
                change = engine_pb2.KvChange(stored=joined) if stored else engine_pb2.KvChange(removed=joined)
                yield self._message(change, len(part))
        self._cleared = False
        self._pending.clear()

    def _message(self, change: engine_pb2.KvChange, count: int) -> engine_pb2.PublishKvRequest:
        first, self._number = self._number + 1, self._number + count
        changes = engine_pb2.KvChanges(first_number=first, changes=[change])
        return engine_pb2.PublishKvRequest(changes=changes)


def _batches(names: list[bytes]) -> Iterator[list[bytes]]:
    return (names[start : start + _NAMES_A_MESSAGE] for start in range(0, len(names), _NAMES_A_MESSAGE))


class PrefixCacheMirror:
    """A copy of the names that the core can hit, and a delta for each router that follows it.

    With the copy, a router that attaches or lost count is answered without the core, whose steps that would
    hold up. It takes some 100 bytes a block, and is bounded by the core's blocks. The core is asked when the
    first router follows, and not before.
    """

    def __init__(self) -> None:
        self._core: Core | None = None
        self._publishes = False
        self._followed = False
        # None until the core has told it.
        self._names: dict[bytes, None] | None = None
        self._parts: dict[bytes, None] = {}
        self.deltas: list[PrefixCacheDelta] = []

    def core_ready(self, core: Core, *, publishes: bool) -> None:
        """Note a core that came up, and whether it publishes its prefix cache."""
        self._core, self._publishes = core, publishes
        self._follow()

    def core_lost(self) -> None:
        """Clear the names: the core's cache is gone."""
        self._core, self._followed, self._names = None, False, None
        for delta in self.deltas:
            delta.change(True, (), ())

    def join(self, *, max_pending: int) -> PrefixCacheDelta:
        """Return the delta of a router that follows, until `leave`."""
        delta = PrefixCacheDelta(self.names, max_pending=max_pending)
        self.deltas.append(delta)
        self._follow()
        return delta

    def leave(self, delta: PrefixCacheDelta) -> None:
        """Drop the delta of a router that follows no more."""
        self.deltas.remove(delta)

    def names(self) -> Collection[bytes] | None:
        """Return the names of all blocks in the prefix cache; None while the core has not told them."""
        return self._names

    def take(self, news: KvContents | KvChanges) -> None:
        """Apply what the core told and pass it on."""
        if isinstance(news, KvContents):
            self._contents(news)
        elif self._names is not None:
            self._changes(self._names, news)

    def _contents(self, part: KvContents) -> None:
        if part.first:
            self._parts = {}
        self._parts.update(dict.fromkeys(split(part.names)))
        if part.last:
            self._names, self._parts = self._parts, {}
            for delta in self.deltas:
                delta.renew()

    def _changes(self, names: dict[bytes, None], news: KvChanges) -> None:
        removed, stored = list(split(news.removed)), list(split(news.stored))
        if news.cleared:
            names.clear()
        for name in removed:
            names.pop(name, None)
        for name in stored:
            names[name] = None
        for delta in self.deltas:
            delta.change(news.cleared, removed, stored)

    def _follow(self) -> None:
        if self.deltas and self._core is not None and self._publishes and not self._followed:
            self._followed = True
            self._core.follow_kv()


def split(names: bytes) -> Iterator[bytes]:
    """Return the names that are joined in `names`."""
    return (names[start : start + DIGEST_BYTES] for start in range(0, len(names), DIGEST_BYTES))
