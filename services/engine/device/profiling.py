"""Activities that torch's profiler records, as events for a trace."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerActivity, record_function

from services.engine.device.base import Stream

Event = dict[str, Any]

# Ties the profiler's clock to ours.
_MARK = "catenary clock"
# Beyond any process id: events of torch's share threads with our spans, but are not nested in them to the
# microsecond, so they get processes of their own.
_FIRST_PROCESS = 10_000_000
# Spans of the profiler itself.
_OWN_CATEGORY = "Trace"


@contextmanager
def torch_activities(stream: Stream, activities: Iterable[ProfilerActivity]) -> Iterator[list[Event]]:
    """Profile the stream's work inside; yield a list that is filled at the end.

    Activities that this build of torch does not know are left out. Raises what the profiler raises.
    """
    # Untyped in part.
    torch_profiler: Any = torch.profiler
    known = set(activities) & torch_profiler.supported_activities()
    profiler = torch_profiler.profile(activities=sorted(known, key=str))
    events: list[Event] = []
    # The profiler sees the thread that starts it.
    mark = stream.submit(lambda: _start(profiler)).result()
    try:
        yield events
    finally:
        # What was enqueued belongs to it.
        stream.synchronize()
        trace = stream.submit(lambda: _stop(profiler)).result()
        events.extend(shown_events(trace, mark))


def _start(profiler: Any) -> float:
    """Start the profiler; return microseconds of our clock at its mark."""
    profiler.__enter__()
    # The first one takes a while to get going.
    for _ in range(2):
        at = time.perf_counter_ns() / 1000
        with record_function(_MARK):
            pass
    return at


def _stop(profiler: Any) -> Sequence[Event]:
    profiler.__exit__(None, None, None)
    with tempfile.TemporaryDirectory(prefix="catenary-profile-") as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        document: dict[str, Any] = json.loads(file.read_bytes())
    events: list[Event] = document["traceEvents"]
    return events


def shown_events(trace: Sequence[Event], mark: float) -> Iterator[Event]:
    """Yield the activities of a trace of torch's, at times of our clock, in processes of their own.

    `mark`: when the last event with the name of the mark began, in microseconds of our clock. Without one,
    nothing could be put in its place, and nothing is given.
    """
    marks = [event["ts"] for event in trace if event["name"] == _MARK and event["ph"] == "X"]
    if not marks:
        return
    shift = mark - max(marks)
    processes: dict[Any, int] = {}
    threads: dict[Any, int] = {}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["name"] == "thread_name"
    }
    for event in trace:
        if event["ph"] != "X" or event.get("cat") == _OWN_CATEGORY or event["name"] == _MARK:
            continue
        process, thread = event["pid"], (event["pid"], event["tid"])
        if process not in processes:
            processes[process] = _FIRST_PROCESS + len(processes)
            yield _name("process_name", processes[process], 0, f"torch profiler: {process}")
        if thread not in threads:
            threads[thread] = len(threads) + 1
            yield _name("thread_name", processes[process], threads[thread], names.get(thread, str(thread[1])))
        yield {
            "name": event["name"],
            "cat": event.get("cat", "activity"),
            "ph": "X",
            "ts": event["ts"] + shift,
            "dur": event["dur"],
            "pid": processes[process],
            "tid": threads[thread],
            "args": _plain(event.get("args", {})),
        }


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": name}}


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """Drop arguments that only torch's own viewer uses; `step` would clash with ours."""
    hidden = ("External id", "Record function id", "Ev Idx", "Sequence number", "Fwd thread id", "step")
    return {name: value for name, value in args.items() if name not in hidden}
