"""What the servicer sees of an engine core, whatever runs behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeAlias

from catenary.v1 import common_pb2
from services.engine.link import (
    CancelProfile,
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStep,
    KvChanges,
    KvContents,
    ProfileEnd,
    ProfilePart,
    StartProfile,
    SubmitSequence,
)

CoreEvent: TypeAlias = (
    CoreStep | CoreProgress | KvContents | KvChanges | ProfilePart | ProfileEnd | CoreFailed
)
ProgressSink: TypeAlias = Callable[[CoreProgress], None]


class CoreStartError(Exception):
    """The core did not come up; the text is one readable line."""


class CoreRefusal(Exception):
    """The core does not take a sequence now."""

    def __init__(self, error: common_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


class Core(ABC):
    """One life of an engine core. A core that failed is not started again: the supervisor makes a new one.

    All methods are called from the servicer's event loop; none of them waits for a step of the core.
    """

    @abstractmethod
    async def start(self, on_progress: ProgressSink) -> CoreReady:
        """Bring the core up, telling `on_progress` what it does meanwhile. Raises CoreStartError."""

    @abstractmethod
    def submit(self, sequence: SubmitSequence) -> None:
        """Hand over a sequence. Its fate comes in `events`. Raises CoreRefusal."""

    @abstractmethod
    def abort(self, keys: Iterable[int]) -> None:
        """End sequences by key; each live one still gets its end row. Unknown keys are ignored."""

    @abstractmethod
    def follow_kv(self) -> None:
        """Tell in `events` what the prefix cache holds, and what changes from then on."""

    @abstractmethod
    def profile(self, message: StartProfile | CancelProfile) -> None:
        """Begin a profile, whose parts and end come in `events`, or give one up. Raises CoreRefusal."""

    @abstractmethod
    def events(self) -> AsyncIterator[CoreEvent]:
        """Steps as they happen; the last event is CoreFailed unless `stop` was called."""

    @abstractmethod
    async def stop(self) -> None:
        """End the core and free what it holds. Idempotent; works in every state."""
