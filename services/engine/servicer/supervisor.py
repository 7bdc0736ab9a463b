"""Keeps a core alive: starts it, watches it, starts another one when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from catenary.backoff import Backoff
from catenary.runtime import StartRefused
from catenary.telemetry import get_logger
from services.engine.link import (
    CoreFailed,
    CoreProgress,
    CoreStep,
    KvChanges,
    KvContents,
    ProfileEnd,
    ProfilePart,
)
from services.engine.servicer.core import Core, CoreStartError
from services.engine.servicer.frontend import EngineFrontend

log = get_logger(__name__)

CoreFactory = Callable[[bool], Core]
"""Makes a core; the argument tells whether it replaces one that died."""


class CoreSupervisor:
    """Runs one core after another. Routers keep their leases meanwhile.

    A first start that fails is the operator's to mend, so it ends the engine; later ones are tried again.
    """

    def __init__(
        self,
        factory: CoreFactory,
        frontend: EngineFrontend,
        backoff: Backoff,
        *,
        served_model_name: str,
        idle_options: Callable[[str], Sequence[str]],
    ) -> None:
        """`idle_options` returns the names of the options that change nothing for a task."""
        self._factory = factory
        self._frontend = frontend
        self._backoff = backoff
        self._name = served_model_name
        self._idle_options = idle_options

    async def run(self) -> None:
        """Serve until cancelled. Raises StartRefused if the first core does not come up."""
        while True:
            core = self._factory(self._frontend.ready is not None)
            try:
                reason = await self._live(core)
            finally:
                await asyncio.shield(core.stop())
            delay = self._backoff.next_delay()
            self._frontend.core_failure = f"the engine's core died: {reason}"
            log.error("engine core is dead, starting another", reason=reason, wait_s=round(delay, 3))
            await asyncio.sleep(delay)
            self._frontend.core_restarts += 1

    async def _live(self, core: Core) -> str:
        """Run one core to its end. Return the reason of its death."""
        first = self._frontend.ready is None
        try:
            ready = await core.start(self._on_progress)
        except CoreStartError as exc:
            if first:
                raise StartRefused(f"the engine did not start: {exc}") from None
            return str(exc)
        log.info(
            "engine core is ready",
            max_model_len=ready.model.max_model_len,
            dtype=ready.model.dtype,
            blocks=ready.capacity.total_blocks,
            block_size=ready.capacity.block_size,
        )
        task = ready.model.task
        if first and (names := self._idle_options(task)):
            log.warning("options that change nothing here", options=list(names), task=task)
        self._frontend.core_ready(core, ready, self._name)
        reason = "its events ended"
        try:
            async for event in core.events():
                match event:
                    case CoreStep():
                        self._backoff.reset()
                        self._frontend.core_stepped(event)
                    case CoreProgress():
                        self._on_progress(event)
                    case KvContents() | KvChanges():
                        self._frontend.prefix_cache.take(event)
                    case ProfilePart() | ProfileEnd():
                        self._frontend.profiles.take(event)
                    case CoreFailed():
                        reason = event.reason
        finally:
            self._frontend.core_lost()
        return reason

    def _on_progress(self, progress: CoreProgress) -> None:
        self._frontend.progress = progress
