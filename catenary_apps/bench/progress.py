"""A bar on a terminal while requests run."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from catenary_apps.load import Progress


class LoadBar:
    """A bar on stderr that leaves nothing behind; none if it is not shown or stderr is no terminal."""

    def __init__(self, label: str, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._label = label
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # A thread that draws would take its time from the requests.
            auto_refresh=False,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task(label, total=None, note="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def tell(self, progress: Progress) -> None:
        """How far it is."""
        note = f"{progress.running} running" + (f", {progress.failed} failed" if progress.failed else "")
        begun = "warm-up" if progress.warming_up else self._label
        self._bars.update(
            self._task,
            description="waiting for the server" if progress.waiting else begun,
            total=progress.total,
            completed=progress.done,
            note=note,
        )
        self._bars.refresh()
