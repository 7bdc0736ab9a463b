"""An engine core in this process, driven by a thread, behind the session of a router."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from itertools import count

from catenary.loop_thread import daemon_thread
from catenary.v1 import common_pb2
from gateway import from_wire, unavailable
from gateway.link.inbox import SequenceEnded, SequenceFeed, deliver, ended
from services.engine.config import EngineConfig
from services.engine.core import serve
from services.engine.link import BlockingLink, CoreFailed, CoreProgress, CoreReady, CoreStep
from services.engine.servicer import (
    Core,
    CoreStartError,
    EngineFrontend,
    ProcessCore,
    RouterOutbox,
    SequenceLimits,
    model_info,
)


class CoreThread:
    """A thread that serves one core; has what a servicer wants of a process (`CoreLife`).

    A thread cannot be killed: its link is cut, and it ends after the step that it is in.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: the core's end of the link. It stays the caller's."""
        # Shared with the thread's link: to shut one down cuts the other.
        self._socket = socket.socket(fileno=os.dup(fd))
        self._link = BlockingLink(socket.socket(fileno=os.dup(fd)))
        self._status = 0
        self._thread = daemon_thread(self._run, name="catenary-core")

    def wait(self) -> int:
        """Wait for the thread's end; what a process would have exited with."""
        self._thread.join()
        return self._status

    def terminate(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def kill(self) -> None:
        """Cut the link: there is nothing harder that a thread would hear."""
        self.terminate()

    def _run(self) -> None:
        try:
            self._status = serve(self._link, own_process=False)
        finally:
            self._link.close()
            self._socket.close()
            # Models and their modules refer to one another: only the collector gives their memory back.
            gc.collect()


def thread_core(config_json: bytes, *, stop_s: float) -> ProcessCore:
    """Return a core that runs in a thread from `start` to `stop`."""
    return ProcessCore(config_json, stop_s=stop_s, spawn=CoreThread)


# Whoever makes requests is the caller of this very process: there is nobody to be protected from.
_MANY = 1_000_000
_NO_STALL_S = 86_400.0


class EngineStartError(Exception):
    """The engine did not come up. One readable line."""


class LocalEngine:
    """Runs sequences on a core in this process. Made and used inside of one event loop."""

    def __init__(self, config: EngineConfig, served_name: str) -> None:
        """Load nothing before `start`. Options of routers, addresses and secrets have no effect here."""
        self._config = config
        self._name = served_name
        self._frontend = EngineFrontend(
            stall_limit_s=_NO_STALL_S,
            limits=SequenceLimits(_MANY, _MANY, _MANY, _MANY),
            remembered_handles=1,
            on_state=lambda _: None,
        )
        self._port = RouterOutbox(0, max_answers=_MANY)
        self._handles = count(1)
        self._feeds: dict[int, SequenceFeed] = {}
        self._core: Core | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self.ready: CoreReady | None = None
        """What the core is, known once started."""

    async def start(self, on_progress: Callable[[str, float | None], None]) -> common_pb2.ModelInfo:
        """Load the model; `on_progress` is told what happens and which part of the start is done.

        Returns what is served. Raises EngineStartError.
        """
        named = self._config.model_copy(update={"served_model_name": self._name})
        core = thread_core(named.model_dump_json().encode(), stop_s=self._config.core_stop_s)
        self._core = core

        def told(progress: CoreProgress) -> None:
            on_progress(progress.activity, progress.fraction)

        try:
            ready = await core.start(told)
        except CoreStartError as error:
            await core.stop()
            raise EngineStartError(str(error)) from None
        self.ready = ready
        self._frontend.core_ready(core, ready, self._name)
        self._frontend.routers.join(self._port, "this process")
        self._tasks = [asyncio.create_task(self._run(core))]
        return model_info(self._name, ready)

    def check(self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str) -> None:
        """Pass every request: nothing is shed in a process without other clients."""

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """Submit as to a gateway's session. Raises ApiError once the core has failed."""
        if self._failure is not None:
            raise unavailable(f"The engine has failed: {self._failure}")
        handle = next(self._handles)
        self._feeds[handle] = feed
        submit = common_pb2.Submit(handle=handle, spec=spec, same_prompt_as=same_prompt_as)
        self._frontend.submit(self._port, submit)
        return handle

    def abort(self, handle: int) -> None:
        """Abort as in a gateway's session. Idempotent."""
        if self._feeds.pop(handle, None) is not None:
            self._frontend.abort(self._port, handle)

    async def stop(self) -> None:
        """End the core. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._core is not None:
            await self._core.stop()

    async def _run(self, core: Core) -> None:
        """Follow the core to its end. A defect here ends what waits, too."""
        try:
            async with asyncio.TaskGroup() as group:
                delivering = group.create_task(self._deliver())
                await self._follow(core)
                delivering.cancel()
        except Exception as error:
            self._failure = self._failure or type(error).__name__
            raise
        finally:
            lost = unavailable(f"The engine has failed: {self._failure or 'it was stopped'}")
            feeds, self._feeds = list(self._feeds.values()), {}
            for feed in feeds:
                feed.finish(SequenceEnded(error=lost))

    async def _follow(self, core: Core) -> None:
        async for event in core.events():
            if isinstance(event, CoreStep):
                self._frontend.core_stepped(event)
            elif isinstance(event, CoreFailed):
                self._failure = event.reason
        self._frontend.core_lost()

    async def _deliver(self) -> None:
        while True:
            await self._port.ready()
            for message in self._port.take():
                if message.HasField("step"):
                    for handle, end in deliver(message.step, self._feeds.get):
                        feed = self._feeds.pop(handle)
                        if end is not None:
                            feed.finish(ended(end))
                elif message.HasField("refusal"):
                    refused = self._feeds.pop(message.refusal.handle, None)
                    if refused is not None:
                        refused.finish(SequenceEnded(error=from_wire(message.refusal.error)))
