"""Child processes with their logs, started, watched, restarted and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from io import FileIO
from pathlib import Path

from catenary.backoff import Backoff
from catenary.config import ConfigError
from catenary.memory import MemoryWatch
from catenary.runtime import StartRefused
from catenary_apps.up.child import wrapped
from catenary_apps.up.plan import ChildSpec, Stage, child_environment
from catenary_apps.up.reporter import Reporter

# Bytes of a line that are held until it ends: what the supervisor may take for each child. Longer lines are
# kept in pieces, so nothing is lost, and no operator needs another number.
LINE_LIMIT = 1 << 20
LOG_LIMIT_BYTES = 16 << 20


async def lines_of(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield what a process writes, line by line without the end, and a line beyond the limit in pieces."""
    while True:
        try:
            raw = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raw = error.partial
            if not raw:
                return
        except asyncio.LimitOverrunError as error:
            raw = await reader.readexactly(error.consumed)
        yield raw.decode(errors="replace").rstrip()


def reap_orphans(known: Collection[int | None]) -> list[int]:
    """Wait for children of this process that have ended and are none of `known`; return their process ids.

    The event loop waits for those that it started itself, and would miss one that was waited for here.
    """
    listed: list[str] = []
    for file in Path("/proc/self/task").glob("*/children"):
        # The thread may have ended since it was listed.
        with contextlib.suppress(OSError):
            listed += file.read_text(encoding="ascii").split()
    reaped = []
    for pid in map(int, listed):
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                reaped += [ended for ended in (os.waitpid(pid, os.WNOHANG)[0],) if ended]
    return reaped


class ChildLog:
    """A child's log file. One older file is kept, so that a chatty child cannot fill the disk.

    Raises StartRefused if it cannot be written at first; later, lines that find no room are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._rotated()
        except OSError as error:
            raise StartRefused(f"the log {path} cannot be written: {error.strerror}") from None

    def _rotated(self) -> FileIO:
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".log.1"))
        # Without a buffer, a line that could not be written is not tried again for ever.
        return self.path.open("wb", buffering=0)

    def write(self, line: str) -> None:
        """Append one line."""
        # A full disk must not end the service whose line it is.
        with contextlib.suppress(OSError):
            self._written += self._file.write((line + "\n").encode())
            if self._written > LOG_LIMIT_BYTES:
                # If there can be no new file now, the next line asks for one again.
                fresh = self._rotated()
                self._file.close()
                self._file, self._written = fresh, 0

    def close(self) -> None:
        self._file.close()


class ChildProcess:
    """Runs one ChildSpec, again and again if asked to; at most one process of it at a time."""

    def __init__(self, spec: ChildSpec, log: ChildLog, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.log = log
        # Of the running process, or of the one that ended last.
        self.last_line = ""
        self._on_line = on_line
        # The operating system knows the process already, and this object not yet its id.
        self.starting = False
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        """The running process's id, which is also that of its group."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def run(self) -> int:
        """Start the process and return its exit code (negative: the signal that ended it)."""
        reader_fd, writer_fd = os.pipe()
        self.last_line = ""
        self.starting = True
        try:
            self._process = await asyncio.create_subprocess_exec(
                *wrapped(self.spec.command, self.spec.cpus),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer_fd,
                stderr=writer_fd,
                # Ctrl-C goes to the terminal's foreground group: only the supervisor may hear it.
                start_new_session=True,
                env=child_environment(self.spec, os.environ),
            )
        except BaseException:
            os.close(reader_fd)
            raise
        finally:
            self.starting = False
            os.close(writer_fd)
        process = self._process
        if self._ending:
            # Told to end while it was being started.
            self.terminate()
        follower = asyncio.create_task(self._follow(reader_fd), name=f"log of {self.spec.name}")
        try:
            code = await process.wait()
        finally:
            # Children of the process are killed with its group; the pipe then ends.
            self._signal_group(process.pid, signal.SIGKILL)
            await process.wait()
            await follower
        return code

    async def _follow(self, reader_fd: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reader_fd, "rb", buffering=0)
        )
        try:
            async for line in lines_of(reader):
                self._take(line)
        finally:
            transport.close()

    def _take(self, line: str) -> None:
        if not line:
            return
        self.last_line = line
        self.log.write(line)
        self._on_line(self.spec.name, line)

    def terminate(self) -> None:
        """Ask the process, and any that is being started, to drain and end."""
        self._ending = True
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process and all of its group at once."""
        if self.pid is not None:
            self._signal_group(self.pid, signal.SIGKILL)

    @staticmethod
    def _signal_group(group: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
# A process that ran so long has not failed to start: its next failure counts as the first.
STABLE_S = 60.0
# Failures in a row, before anything was served, after which the start is given up.
START_ATTEMPTS = 3
# A service that refuses to start exits with these, its last line being the reason: no restart mends that.
REFUSAL_EXIT_CODES = (1, 2)
# Characters of a child's last line that are shown.
REASON_CHARS = 400
# What our services begin that line with; the child's name says the same.
_PROGRAM = re.compile(r"(python -m )?(gateway|services\.\w+): ")
# The first process of a container inherits those whose parent ended, and they stay zombies until it waits.
INIT_PID = 1
REAP_S = 5.0
# Seconds beyond the drain that a process has to end by itself.
STOP_MARGIN_S = 5.0


def describe_exit(code: int, last_line: str = "", memory: MemoryWatch | None = None) -> str:
    """Return how a process ended and why: the signal, or the code and the process's last line.

    `memory`, made before its start, tells whether memory ran out.
    """
    why = memory.explain(code) if memory is not None else ""
    if code >= 0:
        return f"ended with exit code {code}" + (f": {shown_reason(last_line)}" if last_line else "") + why
    try:
        return f"was ended by {signal.Signals(-code).name}{why}"
    except ValueError:
        return f"was ended by signal {-code}{why}"


def shown_reason(line: str) -> str:
    """Return a child's last line as it is shown after the child's name."""
    return _PROGRAM.sub("", line, count=1)[:REASON_CHARS]


class Supervisor:
    """Runs the processes of `specs` until `stop` is set."""

    def __init__(
        self, specs: Sequence[ChildSpec], *, reporter: Reporter, log_dir: Path, drain_s: float, verbose: bool
    ) -> None:
        self._reporter = reporter
        self._drain_s = drain_s
        self._verbose = verbose
        self._stopping = asyncio.Event()
        self._ready = False
        self.children = tuple(
            ChildProcess(spec, ChildLog(log_dir / f"{spec.name}.log"), self._on_line) for spec in specs
        )

    def mark_ready(self) -> None:
        """Note that requests are being served: from now on a crash is repaired for ever."""
        self._ready = True

    async def run(
        self,
        stop: asyncio.Event,
        watch: Callable[[], Awaitable[None]],
        drains: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the processes, and `watch` beside them, until `stop` is set; then call `drains`, and drain.

        Raises StartRefused (in an exception group) if a process cannot be started; nothing is left running.
        """
        try:
            async with asyncio.TaskGroup() as group:
                keepers = {child: group.create_task(self._keep(child)) for child in self.children}
                watcher = group.create_task(_as_coroutine(watch))
                reaper = group.create_task(self._reap())
                await stop.wait()
                watcher.cancel()
                reaper.cancel()
                drains()
                await self._drain(keepers)
        finally:
            for child in self.children:
                child.kill()
                child.log.close()

    async def _keep(self, child: ChildProcess) -> None:
        failures, backoff = 0, Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0)
        while not self._stopping.is_set():
            started = time.monotonic()
            memory = MemoryWatch()
            code = await child.run()
            if self._stopping.is_set():
                return
            # One that was told to drain ends well: it is not one that fails to start.
            if time.monotonic() - started > STABLE_S or (self._ready and code == 0):
                failures = 0
                backoff.reset()
            failures += 1
            if not self._ready and (_refused(child, code) or failures >= START_ATTEMPTS):
                raise self._give_up(child, code, memory)
            delay = backoff.next_delay()
            # One that ends well has no last words: its last line is any line of its log.
            end = f"{child.spec.name} {describe_exit(code, child.last_line if code else '', memory)}"
            self._reporter.line(f"{end}; starting it again in {delay:g} s (log: {child.log.path})")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _reap(self) -> None:
        """Wait, as the first process of a container, for orphans of the services."""
        while os.getpid() == INIT_PID:
            if not any(child.starting for child in self.children):
                reap_orphans({child.pid for child in self.children})
            await asyncio.sleep(REAP_S)

    def _give_up(self, child: ChildProcess, code: int, memory: MemoryWatch) -> StartRefused:
        self._reporter.close()
        refused = _refused(child, code)
        reason = shown_reason(child.last_line) if refused else describe_exit(code, child.last_line, memory)
        # A service says by its code whether its options are wrong, as this command does.
        kind = ConfigError if refused and code == ConfigError.exit_code else StartRefused
        return kind(f"{child.spec.name}: {reason} (log: {child.log.path})")

    async def _drain(self, keepers: dict[ChildProcess, asyncio.Task[None]]) -> None:
        """Stop the stages one after another; what does not end in time is killed."""
        self._stopping.set()
        deadline = time.monotonic() + self._drain_s + STOP_MARGIN_S
        for stage in Stage:
            members = {child: task for child, task in keepers.items() if child.spec.stage is stage}
            if not members:
                continue
            for child in members:
                child.terminate()
            left = max(deadline - time.monotonic(), STOP_MARGIN_S)
            _, late = await asyncio.wait(members.values(), timeout=left)
            for child, task in members.items():
                if task in late:
                    self._reporter.line(f"{child.spec.name} was killed: it had not ended in time")
                    child.kill()
            if late:
                await asyncio.wait(late)

    def _on_line(self, name: str, line: str) -> None:
        if self._verbose:
            self._reporter.line(f"{name} | {line}")


def _refused(child: ChildProcess, code: int) -> bool:
    return code in REFUSAL_EXIT_CODES and bool(child.last_line)


async def _as_coroutine(function: Callable[[], Awaitable[None]]) -> None:
    await function()
