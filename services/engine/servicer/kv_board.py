"""What the core's prefix cache holds, kept here for the routers that want to know."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from catenary.blockhash import DIGEST_BYTES
from services.engine.link import KvChanges, KvContents
from services.engine.servicer.core_client import Core
from services.engine.servicer.kv_outbox import KvOutbox


class KvBoard:
    """A copy of the names that the core can hit, and the outboxes of those who follow it.

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
        self._outboxes: list[KvOutbox] = []

    def core_ready(self, core: Core, *, publishes: bool) -> None:
        """A core came up; whether it has anything to follow."""
        self._core, self._publishes = core, publishes
        self._follow()

    def core_lost(self) -> None:
        """The core is dead, and its cache with it."""
        self._core, self._followed, self._names = None, False, None
        for outbox in self._outboxes:
            outbox.change(True, (), ())

    def join(self, *, max_pending: int) -> KvOutbox:
        """A router follows: its outbox, for as long as it does not `leave`."""
        outbox = KvOutbox(self.names, max_pending=max_pending)
        self._outboxes.append(outbox)
        self._follow()
        return outbox

    def leave(self, outbox: KvOutbox) -> None:
        """A router follows no more."""
        self._outboxes.remove(outbox)

    def names(self) -> Collection[bytes] | None:
        """All names that can be hit; None while the core has not told."""
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
            for outbox in self._outboxes:
                outbox.renew()

    def _changes(self, names: dict[bytes, None], news: KvChanges) -> None:
        removed, stored = list(split(news.removed)), list(split(news.stored))
        if news.cleared:
            names.clear()
        for name in removed:
            names.pop(name, None)
        for name in stored:
            names[name] = None
        for outbox in self._outboxes:
            outbox.change(news.cleared, removed, stored)

    def _follow(self) -> None:
        if self._outboxes and self._core is not None and self._publishes and not self._followed:
            self._followed = True
            self._core.follow_kv()


def split(names: bytes) -> Iterator[bytes]:
    """The names that are joined in `names`."""
    return (names[start : start + DIGEST_BYTES] for start in range(0, len(names), DIGEST_BYTES))
