"""What the cores of this engine say of their load: the last word of this one, and counts over all of them."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from catenary.v1 import engine_pb2
from services.engine.link import CoreLoad

_COUNTERS = ("steps", "generated_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions")


class CoreLoads:
    """`now` is the load as of the core's last report; empty while there is no core."""

    def __init__(self) -> None:
        self.now = CoreLoad()
        self._past = CoreLoad()
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
        self._past = replace(CoreLoad(), **self._totals())
        self.take(CoreLoad())

    def count_into(self, report: engine_pb2.LoadReport) -> None:
        """Enter what is counted over the lives of all cores."""
        for name, total in self._totals().items():
            setattr(report, name, total)

    def _totals(self) -> dict[str, int]:
        return {name: getattr(self._past, name) + getattr(self.now, name) for name in _COUNTERS}

    async def unoffered(self) -> None:
        """Wait until the core keeps no KV that another engine is about to fetch."""
        await self._unoffered.wait()
