"""Reports the progress of a start: moving bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import select
import sys
from abc import ABC, abstractmethod
from typing import IO, cast

# A reader that takes nothing for so long loses lines: waiting for it would hold up the supervisor.
WRITABLE_S = 1.0
# A pipe that can be written to takes this much at once.
PIPE_BYTES = select.PIPE_BUF


class SteadyOutput(io.TextIOBase):
    """Standard output as a file to which writing never fails: a text that cannot be written is dropped.

    Its disk may be full, its reader gone or stopped, its terminal closed, and its encoding may lack a
    character: none of these is a reason to stop serving.
    """

    def __init__(self) -> None:
        self._stalled = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of standard output."""
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return sys.stdout.fileno()

    def write(self, text: str) -> int:
        """Write `text` past Python's buffer, in which what failed would be tried again at the exit."""
        if sys.stdout is None:
            return len(text)
        try:
            fd = sys.stdout.fileno()
        except (OSError, ValueError):
            # No file of the system's: a program that embeds us has put its own in the place.
            sys.stdout.write(text)
            return len(text)
        data = memoryview(text.encode(self.encoding, "backslashreplace"))
        try:
            while data and self._takes(fd):
                data = data[os.write(fd, data[:PIPE_BYTES]) :]
        except OSError:
            pass
        return len(text)

    def _takes(self, fd: int) -> bool:
        _, ready, _ = select.select((), (fd,), (), 0 if self._stalled else WRITABLE_S)
        self._stalled = not ready
        return bool(ready)


class Reporter(ABC):
    """Shows lines, and what each process is doing until it is done."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Show a line for good."""

    @abstractmethod
    def activity(self, name: str, text: str, fraction: float | None = None) -> None:
        """Show what `name` does now; `fraction` is how far it is (0..1), if that can be told."""

    @abstractmethod
    def done(self, name: str, text: str) -> None:
        """Show that `name` has started."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainReporter(Reporter):
    """One line per change, for logs and pipes."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._output = SteadyOutput()

    def line(self, text: str) -> None:
        self._output.write(text + "\n")

    def activity(self, name: str, text: str, fraction: float | None = None) -> None:
        if self._shown.get(name) != text:
            self._shown[name] = text
            self.line(f"{name}: {text}")

    def done(self, name: str, text: str) -> None:
        self.activity(name, text)

    def close(self) -> None:
        self._shown.clear()


class TerminalReporter(Reporter):
    """A spinner or bar for each process that is starting, above which lines scroll."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

        # The ready line is there to be pasted, so nothing may wrap or colour it.
        output = cast("IO[str]", SteadyOutput())
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[name]:<13}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started = False

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def activity(self, name: str, text: str, fraction: float | None = None) -> None:
        if not self._started:
            self._progress.start()
            self._started = True
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, total=None, name=name)
        total, completed = (None, None) if fraction is None else (1.0, fraction)
        self._progress.update(self._tasks[name], description=text, total=total, completed=completed)

    def done(self, name: str, text: str) -> None:
        self.activity(name, text, 1.0)

    def close(self) -> None:
        if self._started:
            self._progress.stop()
            self._started = False
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()


def make_reporter() -> Reporter:
    """Return the reporter that fits where standard output goes."""
    return TerminalReporter() if SteadyOutput().isatty() else PlainReporter()
