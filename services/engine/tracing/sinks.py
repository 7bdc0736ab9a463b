"""What takes the events of a tracer."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TextIO

import msgspec

from services.engine.tracing.events import Event, name_event, thread_name_event

_PROCESS = "engine-core"


class EventSink(ABC):
    """Takes events from any thread, and names each thread once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()

    def add(self, event: Event) -> None:
        """Takes an event of the calling thread."""
        with self._lock:
            if event["tid"] not in self._threads:
                self._threads.add(event["tid"])
                self._keep(thread_name_event())
            self._keep(event)

    @abstractmethod
    def close(self) -> None:
        """Takes no more."""

    @abstractmethod
    def _keep(self, event: Event) -> None:
        """Keeps one event; the lock is held."""


class EventFile(EventSink):
    """Writes each event as it comes; with `steps`, only those of these steps, after which it is complete.

    A file without its last bracket, left by a process that was killed, is still read.
    """

    def __init__(self, path: Path, steps: range | None = None) -> None:
        """Raises OSError if the file cannot be written."""
        super().__init__()
        self._steps = steps
        self._inside = steps is None
        # Open until then.
        self._file: TextIO | None = path.open("w", encoding="utf-8")
        self._file.write("[\n")

    def close(self) -> None:
        """Completes the file."""
        with self._lock:
            self._complete()

    def _complete(self) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(name_event("process_name", _PROCESS)).decode() + "\n]\n")
            self._file.close()
            self._file = None

    def _keep(self, event: Event) -> None:
        step = event["args"].get("step")
        if self._steps is not None and step is not None:
            # What belongs to no step is written beside those that do.
            self._inside = step in self._steps
            # Two steps are in flight at most.
            if step >= self._steps.stop + 2:
                self._complete()
        if self._file is not None and (self._inside or event["ph"] == "M"):
            self._file.write(msgspec.json.encode(event).decode() + ",\n")


class EventBuffer(EventSink):
    """Keeps up to `limit` events in memory and counts what it has to drop."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._closed = False
        self.events: list[Event] = [name_event("process_name", _PROCESS)]
        self.dropped = 0

    def close(self) -> None:
        """Keeps what it has."""
        with self._lock:
            self._closed = True

    def extend(self, events: list[Event]) -> None:
        """Takes events that bring their own processes and threads."""
        with self._lock:
            for event in events:
                self._keep(event)

    def _keep(self, event: Event) -> None:
        if self._closed:
            return
        if len(self.events) >= self._limit:
            self.dropped += 1
        else:
            self.events.append(event)
