"""One child process: started so that it dies with us, its output followed, its whole group ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection
from io import FileIO
from pathlib import Path

from catenary.runtime import StartRefused
from catenary_apps.up.child import wrapped
from catenary_apps.up.plan import ChildSpec, child_environment

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
