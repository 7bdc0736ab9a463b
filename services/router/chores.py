"""Periodic work of the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from catenary.telemetry import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to do every `period_s` seconds.

    `judges`: it judges peers by their silence. After a time in which this process stood still, when its peers
    did not, it is left out once: the peers are heard for a period first.
    """

    name: str
    period_s: float
    act: Callable[[], None]
    judges: bool = False


class Chores:
    """Runs each chore in a task of its own: one that fails holds up no other and is tried again."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *chores: Chore) -> None:
        """Begin; the first time comes after a period."""
        self._tasks += [asyncio.create_task(_repeat(chore), name=chore.name) for chore in chores]

    async def stop(self) -> None:
        """End all. May be called without a start."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _repeat(chore: Chore) -> None:
    loop = asyncio.get_running_loop()
    heard = True
    well = True
    while True:
        due = loop.time() + chore.period_s
        await asyncio.sleep(chore.period_s)
        heard = not heard or loop.time() - due <= chore.period_s
        if chore.judges and not heard:
            continue
        try:
            chore.act()
            well = True
        except Exception:
            # Once per row of failures: a chore comes several times a second.
            if well:
                _log.exception("a chore failed", chore=chore.name)
            well = False
