"""Where the time of steps goes, as a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class StepTracer:
    """Writes spans as Chrome trace events, each as it ends; without a file it does nothing.

    The spans of a step are plan, prepare and commit in the loop's thread, forward, sample and copy in the
    device's; their `step` argument counts launched steps from 1. A file without its last bracket, left by a
    process that was killed, is still read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        # Opened for the life of the engine.
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path else None
        if self._file is not None:
            self._file.write("[\n")

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Traces what is done inside as a span of this thread."""
        if self._file is None:
            yield
            return
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._write(name, step, start, time.perf_counter_ns())

    def close(self) -> None:
        """Completes the file."""
        with self._lock:
            if self._file is not None:
                self._write_event(
                    {"name": "process_name", "ph": "M", "args": {"name": "engine-core"}}, end="\n]\n"
                )
                self._file.close()
                self._file = None

    def _write(self, name: str, step: int, start: int, end: int) -> None:
        with self._lock:
            if self._file is None:
                return
            thread = threading.current_thread()
            if threading.get_native_id() not in self._threads:
                self._threads.add(threading.get_native_id())
                self._write_event({"name": "thread_name", "ph": "M", "args": {"name": thread.name}})
            # Microseconds.
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            self._write_event({"name": name, "ph": "X", **times, "args": {"step": step}})

    def _write_event(self, event: dict[str, Any], end: str = ",\n") -> None:
        if self._file is not None:
            event = {**event, "pid": os.getpid(), "tid": threading.get_native_id()}
            self._file.write(json.dumps(event, separators=(",", ":")) + end)
