"""The core as the servicer drives it: its interface, and the process that implements it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from catenary.frames import LinkClosed, LinkError
from catenary.loop_thread import in_daemon_thread
from catenary.memory import MemoryWatch
from catenary.outbox import Messages, Outbox
from catenary.runtime import module_command
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.engine.link import (
    AbortSequences,
    AsyncLink,
    CancelProfile,
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStep,
    FollowKv,
    KvChanges,
    KvContents,
    ProfileEnd,
    ProfilePart,
    StartCore,
    StartProfile,
    StopCore,
    SubmitSequence,
    ToCore,
)

log = get_logger(__name__)


PRELOAD = "LD_PRELOAD"
# In the order in which they are tried: file names begin so.
_LIBRARIES = {"tcmalloc": ("libtcmalloc_minimal.so.", "libtcmalloc.so."), "jemalloc": ("libjemalloc.so.",)}
_FOLDERS = ("usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


def preloaded(malloc: str, environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return what to add to a core's environment for the option `malloc`.

    auto leaves a preload that the environment has as it is. Raises ValueError, one line, for an allocator
    that was asked for and is not there.
    """
    chosen = environment.get(PRELOAD, "")
    if malloc == "system" or (malloc == "auto" and chosen):
        return {}
    names = list(_LIBRARIES) if malloc == "auto" else [malloc]
    found = next((path for name in names if (path := _find(name, root)) is not None), None)
    if found is not None:
        return {PRELOAD: f"{found}:{chosen}" if chosen else str(found)}
    if malloc == "auto":
        return {}
    raise ValueError(
        f"malloc {malloc}: no {_LIBRARIES[malloc][0]}* in {', '.join('/' + one for one in _FOLDERS)}"
    )


def _find(name: str, root: Path) -> Path | None:
    for start in _LIBRARIES[name]:
        for folder in _FOLDERS:
            # The number after .so is that of the interface: programs load the file that ends with it.
            if found := sorted((root / folder).glob(f"{start}[0-9]")):
                return found[0]
    return None


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
        """Yield steps as they happen; the last event is CoreFailed unless `stop` was called."""

    @abstractmethod
    async def stop(self) -> None:
        """End the core and free what it holds. Idempotent; works in every state."""


# Commands to the core, of a hundred bytes and a prompt each. Most are submissions and aborts of sequences,
# whose number has a limit of its own: only a core that hangs lets so many commands wait.
_MAX_QUEUED = 65_536
_EXIT_GRACE_S = 1.0

# Its modules come from where this process has its own.
CORE_COMMAND = module_command("services.engine.core")


class CoreLife(Protocol):
    """The process of a core, or a stand-in."""

    def wait(self) -> int:
        """Block until it has ended; its exit status, of a signal the negative number."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""


Spawn: TypeAlias = Callable[[int], CoreLife]
"""Starts a core that speaks on the descriptor, which is its own copy's to keep."""


def spawn_process(env: Mapping[str, str] | None, command: Sequence[str] = CORE_COMMAND) -> Spawn:
    """Return a Spawn of processes with this command, in this environment (None: that of this process)."""

    def spawn(fd: int) -> subprocess.Popen[bytes]:
        # Popen spawns by vfork, which passes gRPC's fork handlers by; the event loop's own spawn forks.
        return subprocess.Popen(
            [*command, "--link-fd", str(fd)], pass_fds=(fd,), stdin=subprocess.DEVNULL, env=env
        )

    return spawn


class ProcessCore(Core):
    """One core process: spawned, spoken to over a socketpair, and gone after `stop`."""

    def __init__(self, config_json: bytes, *, stop_s: float, spawn: Spawn) -> None:
        self._config_json = config_json
        self._stop_s = stop_s
        self._spawn = spawn
        self.process: CoreLife | None = None
        self._memory: MemoryWatch | None = None
        self._exit: asyncio.Future[int] | None = None
        self._link: AsyncLink | None = None
        self._sender: asyncio.Task[None] | None = None
        self._commands = Messages[ToCore]()
        self._outbox = Outbox(self._commands, limit=_MAX_QUEUED)
        self._ready = False
        self._stopping = False

    async def start(self, on_progress: ProgressSink) -> CoreReady:
        """Spawn the process and wait until it is ready; a model can take minutes to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._link = await AsyncLink.open(ours)
            self._memory = MemoryWatch()
            self.process = self._spawn(theirs.fileno())
        self._exit = in_daemon_thread(self.process.wait, name="engine-core-exit")
        self._sender = asyncio.create_task(self._send(self._link))
        self._outbox.put(self._commands, StartCore(config_json=self._config_json))
        while True:
            match await self._receive(self._link):
                case CoreReady() as ready:
                    self._ready = True
                    return ready
                case CoreProgress() as progress:
                    on_progress(progress)
                case CoreFailed(reason=reason):
                    raise CoreStartError(reason)
                case _:
                    raise CoreStartError("the core made a step before it was ready")

    def submit(self, sequence: SubmitSequence) -> None:
        """Queue a sequence for the socket."""
        self._put(sequence)

    def profile(self, message: StartProfile | CancelProfile) -> None:
        """Queue the message for the socket."""
        self._put(message)

    def _put(self, message: ToCore) -> None:
        if self._outbox.full:
            text = f"The engine is busy: {_MAX_QUEUED} commands wait for its core."
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message=text, retryable=True)
            raise CoreRefusal(error)
        self._outbox.put(self._commands, message)

    def abort(self, keys: Iterable[int]) -> None:
        """Queue an abort."""
        self._insist(AbortSequences(keys=list(keys)))

    def follow_kv(self) -> None:
        """Queue the message for the socket."""
        self._insist(FollowKv())

    def _insist(self, message: ToCore) -> None:
        """Queue a message. A core so far behind that there is no room is as good as dead, and is killed."""
        if self._outbox.full:
            log.error("engine core reads no commands, killing it", queued=_MAX_QUEUED)
            self._kill()
        else:
            self._outbox.put(self._commands, message)

    async def events(self) -> AsyncIterator[CoreEvent]:
        """See Core."""
        while self._link is not None and not self._stopping:
            event = await self._receive(self._link)
            if not isinstance(event, CoreReady):
                yield event
            if isinstance(event, CoreFailed):
                return

    async def stop(self) -> None:
        """Ask the process to end, then make it."""
        self._stopping = True
        if self._sender is not None:
            self._sender.cancel()
        if self._link is not None:
            await self._say_stop(self._link)
        if self.process is not None and self._exit is not None:
            await self._end(self.process, self._exit)
        if self._link is not None:
            await self._link.aclose()
            self._link = None

    async def _say_stop(self, link: AsyncLink) -> None:
        try:
            async with asyncio.timeout(_EXIT_GRACE_S):
                await link.send(StopCore())
        except (LinkError, TimeoutError):
            return

    async def _end(self, process: CoreLife, ended: asyncio.Future[int]) -> None:
        # A core that still loads does not read its link; there is nothing in it to end in good order.
        first = self._stop_s if self._ready else 0.0
        for patience, force in ((first, process.terminate), (_EXIT_GRACE_S, process.kill)):
            done, _ = await asyncio.wait((ended,), timeout=patience)
            if done:
                return
            if patience:
                log.warning("engine core does not end by itself", waited_s=patience)
            force()
        await ended

    async def _receive(self, link: AsyncLink) -> CoreReady | CoreEvent:
        try:
            return await link.receive()
        except LinkClosed:
            return CoreFailed(reason=await self._death())
        except LinkError as exc:
            return CoreFailed(reason=str(exc))

    async def _death(self) -> str:
        """Return how the process ended, in words."""
        if self._exit is None:
            return "the core process was never started"
        done, _ = await asyncio.wait((self._exit,), timeout=_EXIT_GRACE_S)
        if not done:
            return "the core process closed its link but did not end"
        status = self._exit.result()
        if status < 0:
            how = f"the core process was killed by {_signal_name(-status)}"
        else:
            how = f"the core process ended with status {status}"
        return how + (self._memory.explain(status) if self._memory is not None else "")

    async def _send(self, link: AsyncLink) -> None:
        while (message := await self._outbox.next()) is not None:
            try:
                await link.send(message)
            except LinkClosed:
                return
            except LinkError:
                log.exception("a command for the core could not be sent")
                self._kill()
                return

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a realtime signal: they have no names of their own
        return f"signal {number}"
