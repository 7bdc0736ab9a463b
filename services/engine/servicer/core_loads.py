"""What the cores of this engine say of their load: the last word of this one, and counts over all of them."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from services.engine.link import CoreLoad, GraphLoad, TransferLoad

# What is so now. All else is counted from a core's start on.
_NOW: dict[type, frozenset[str]] = {
    CoreLoad: frozenset({"running", "waiting", "used_blocks", "pending_prefill_tokens"}),
    GraphLoad: frozenset({"captured", "warm", "to_warm"}),
    TransferLoad: frozenset({"offers", "blocks", "fetching"}),
}


class CoreLoads:
    """`now` is the load as of the core's last report; empty while there is no core."""

    def __init__(self) -> None:
        self.now = CoreLoad()
        # What cores that are dead have counted.
        self._past: CoreLoad | None = None
        # Set while the core keeps no KV for other engines.
        self._unoffered = asyncio.Event()
        self._unoffered.set()

    def take(self, load: CoreLoad) -> None:
        """The core reports."""
        self.now = load
        if load.transfers.offers:
            self._unoffered.clear()
        else:
            self._unoffered.set()

    def core_lost(self) -> None:
        """The core is dead; what it has counted stays."""
        self._past = self.total
        self.take(CoreLoad())

    @property
    def total(self) -> CoreLoad:
        """The load as it is now, with what is counted since the engine's start."""
        if self._past is None:
            return self.now
        total: CoreLoad = _added(self._past, self.now)
        return total

    async def unoffered(self) -> None:
        """Wait until the core keeps no KV that another engine is about to fetch."""
        await self._unoffered.wait()


def _added(past: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {key: past.get(key, 0) + now.get(key, 0) for key in past | now}
    if not isinstance(now, Struct):
        return past + now
    names = set(now.__struct_fields__) - _NOW.get(type(now), frozenset())
    return replace(now, **{name: _added(getattr(past, name), getattr(now, name)) for name in names})
