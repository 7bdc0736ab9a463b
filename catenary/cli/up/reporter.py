"""What a person sees of a start: moving bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod


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

    def line(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

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
        self._console = Console(highlight=False, soft_wrap=True)
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
    return TerminalReporter() if sys.stdout.isatty() else PlainReporter()
