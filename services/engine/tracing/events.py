"""Events of Chrome's trace event format, which Perfetto and chrome://tracing show.

Times are microseconds of `time.perf_counter`, which is the system's monotonic clock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

Event = dict[str, Any]

# Of a part of a document, so that it passes any limit on messages.
_PART_BYTES = 256 * 1024
# Few enough events to stay near that.
_PART_EVENTS = 1024


def span_event(name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> Event:
    """A span of the calling thread."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        **_here(),
        "args": dict(args),
    }


def counter_event(name: str, at_ns: int, values: Mapping[str, int]) -> Event:
    """Values from this moment on, one curve each."""
    return {"name": name, "ph": "C", "ts": at_ns / 1000, **_here(), "args": dict(values)}


def name_event(kind: str, name: str) -> Event:
    """`process_name` or `thread_name` of the caller."""
    return {"name": kind, "ph": "M", "ts": 0, **_here(), "args": {"name": name}}


def thread_name_event() -> Event:
    """The calling thread's name."""
    return name_event("thread_name", threading.current_thread().name)


def _here() -> dict[str, int]:
    return {"pid": os.getpid(), "tid": threading.get_native_id()}


def trace_parts(events: Sequence[Event], facts: Mapping[str, Any]) -> Iterator[bytes]:
    """A trace document in parts of about 256 KiB: names first, then all else in the order of its begin.

    `facts` are about the trace as a whole; viewers show them as its metadata.
    """
    ordered = sorted(events, key=lambda event: (event["ph"] != "M", event["ts"]))
    head = b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(dict(facts)) + b',"traceEvents":['
    pending = bytearray(head)
    for start in range(0, len(ordered), _PART_EVENTS):
        # Without the brackets.
        pending += (b"," if start else b"") + msgspec.json.encode(ordered[start : start + _PART_EVENTS])[1:-1]
        while len(pending) > _PART_BYTES:
            yield bytes(pending[:_PART_BYTES])
            del pending[:_PART_BYTES]
    yield bytes(pending + b"]}\n")
