"""Bars on a terminal, while a model loads and a batch runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class _Bar:
    """A bar on stderr that leaves nothing behind; none if it is not shown or stderr is no terminal."""

    def __init__(self, progress: Progress, text: str, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task(text, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class StartProgress(_Bar):
    """What a starting engine does, and which part of the start is done."""

    def __init__(self, *, shown: bool) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"))
        super().__init__(_progress(columns, shown=shown), "", 1.0)

    def tell(self, activity: str, fraction: float | None) -> None:
        """`fraction` is 0..1, or None if it cannot be told."""
        self._progress.update(self._task, description=activity, completed=fraction)


class BatchProgress(_Bar):
    """How many prompts are done."""

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(_progress(columns, shown=shown), "", total)

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)


def _progress(
    columns: tuple[BarColumn | TextColumn | MofNCompleteColumn | TimeRemainingColumn, ...], *, shown: bool
) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
