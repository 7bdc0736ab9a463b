"""What goes on while a model loads and a batch runs, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_PREFIX = "catenary: "
# In a pipe a count is told so often.
_EVERY_S = 10.0
_PROMPTS = "{} of {} prompts are done"
_NUMBER = re.compile(r"\d+")


class Shown(ABC):
    """Shows something while it is entered, and leaves nothing behind on a terminal."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StartProgress(Shown):
    """What a starting engine does, and which part of the start is done. Begins with a line at once."""

    def __init__(self, model: str, *, shown: bool) -> None:
        self._lines = _Lines() if shown else None
        self._bar: _Bar | None = None
        if shown and _is_terminal():
            self._lines, self._bar = (
                None,
                _Bar((BarColumn(), TextColumn("{task.description}", markup=False)), 1.0),
            )
        self.tell(f"loading {model}", None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def tell(self, activity: str, fraction: float | None) -> None:
        """`fraction` is 0..1, or None if it cannot be told."""
        if self._bar is not None:
            self._bar.update(activity, fraction)
        if self._lines is not None:
            self._lines.tell(activity)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None and error is None:
            self._lines.tell("ready")


class BatchProgress(Shown):
    """How many prompts are done."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._done = total, 0
        self._lines = _Lines(_PROMPTS.format(0, total)) if shown else None
        self._bar: _Bar | None = None
        if shown and _is_terminal():
            columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._lines, self._bar = None, _Bar(columns, total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance()
        if self._lines is not None:
            self._lines.tell(_PROMPTS.format(self._done, self._total))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    """A line for what is new. One that differs in its numbers alone is new after a while.

    `known`: counts as told already.
    """

    def __init__(self, known: str = "") -> None:
        self._text, self._shape = known, _NUMBER.sub("#", known)
        self._told_s = time.monotonic()

    def tell(self, text: str) -> None:
        shape, now = _NUMBER.sub("#", text), time.monotonic()
        if text == self._text or (shape == self._shape and now - self._told_s < _EVERY_S):
            return
        self._text, self._shape, self._told_s = text, shape, now
        if sys.stderr is not None:
            # A program may have closed it.
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{_PREFIX}{text}\n")
                sys.stderr.flush()


class _Bar:
    """A bar on the terminal."""

    def __init__(self, columns: tuple[ProgressColumn, ...], total: float) -> None:
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total)
        self.start, self.stop = self._progress.start, self._progress.stop

    def update(self, text: str, fraction: float | None) -> None:
        self._progress.update(self._task, description=text, completed=fraction)

    def advance(self) -> None:
        self._progress.advance(self._task)


def _is_terminal() -> bool:
    return Console(stderr=True).is_terminal
