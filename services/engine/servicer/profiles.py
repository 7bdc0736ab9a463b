"""Profiles of the core's steps, passed from the core to the caller of EngineService.Profile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from catenary.rpc import RpcError, refuse
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.engine.link import CancelProfile, ProfileEnd, ProfilePart, StartProfile
from services.engine.servicer.core import Core, CoreRefusal

log = get_logger(__name__)

# Longest step beyond the end of a profile, in seconds: the core answers between steps.
_GRACE_S = 30.0


class Profiles:
    """At most one profile at a time. Used from one event loop."""

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self._grace_s = grace_s
        self._core: Core | None = None
        self._ids = 0
        self._inbox: asyncio.Queue[ProfilePart | ProfileEnd | None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the core makes one."""
        return self._inbox is not None

    def core_ready(self, core: Core) -> None:
        """Note a core that came up."""
        self._core = core

    def core_lost(self) -> None:
        """End a profile that runs: its core is dead."""
        self._core = None
        if self._inbox is not None:
            self._inbox.put_nowait(None)
            self._inbox = None

    def take(self, message: ProfilePart | ProfileEnd) -> None:
        """Pass on a message of the core; drop parts of a profile that was given up."""
        if self._inbox is None or message.id != self._ids:
            return
        self._inbox.put_nowait(message)
        if isinstance(message, ProfileEnd):
            # The next one need not wait until this one is read.
            self._inbox = None

    async def run(
        self, *, steps: int, seconds: float, device_activities: bool
    ) -> AsyncGenerator[ProfilePart | ProfileEnd]:
        """Take a profile and yield its messages; the last one is ProfileEnd. Closing the generator cancels
        it.

        Raises RpcError: another profile runs, there is no core, it died, it does not answer, or its device's
        profiler failed.
        """
        core = self._core
        if core is None:
            message = "The engine's core is not running: it is starting, or died."
            raise refuse(common_pb2.ERROR_CODE_UNAVAILABLE, message, retryable=True)
        if self.busy:
            message = "The engine makes a profile already, and it makes one at a time."
            raise refuse(common_pb2.ERROR_CODE_OVERLOADED, message, retryable=True)
        self._ids += 1
        inbox = self._inbox = asyncio.Queue()
        patience = seconds + self._grace_s
        received: ProfilePart | ProfileEnd | None = None
        try:
            core.profile(StartProfile(self._ids, steps, seconds, device_activities))
            while not isinstance(received, ProfileEnd):
                received = _checked(await asyncio.wait_for(inbox.get(), patience))
                patience = self._grace_s
                yield received
        except CoreRefusal as refusal:
            raise RpcError(refusal.error) from None
        except TimeoutError:
            message = f"The engine is stuck in a step, {self._grace_s:.0f} s beyond the profile's time."
            raise refuse(common_pb2.ERROR_CODE_TIMEOUT, message, retryable=True) from None
        finally:
            if self._inbox is inbox:
                self._inbox = None
                self._give_up(core)

    def _give_up(self, core: Core) -> None:
        try:
            core.profile(CancelProfile(self._ids))
        except CoreRefusal:
            log.warning("the core did not hear that its profile is not wanted any more")


def _checked(received: ProfilePart | ProfileEnd | None) -> ProfilePart | ProfileEnd:
    if received is None:
        message = "The engine's core died during the profile."
        raise refuse(common_pb2.ERROR_CODE_ENGINE_LOST, message, retryable=True)
    if isinstance(received, ProfileEnd) and received.error is not None:
        raise refuse(common_pb2.ERROR_CODE_INTERNAL, received.error)
    return received
