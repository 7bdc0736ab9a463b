from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.engine.core.loop import Profiler
from services.engine.link import CancelProfile, ProfileEnd, ProfilePart, StartProfile
from services.engine.tracing import Event, EventBuffer, EventFile, StepTracer, trace_parts


def one_step(tracer: StepTracer, step: int) -> None:
    with tracer.span("plan", step):
        pass
    with tracer.span("step", step), tracer.span("forward"):
        pass


def document(messages: list[Any]) -> dict[str, Any]:
    parts = b"".join(message.data for message in messages if isinstance(message, ProfilePart))
    found: dict[str, Any] = json.loads(parts)
    return found


def spans(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event["name"], event["args"].get("step")) for event in events if event["ph"] == "X"]


def test_without_a_listener_nothing_is_made() -> None:
    tracer = StepTracer()
    with tracer.span("plan", 1) as span:
        assert span is None
    assert tracer.span("plan", 1) is tracer.span("commit", 2)
    assert not tracer.on


def test_a_span_inside_another_has_its_step_and_outside_none() -> None:
    buffer = EventBuffer(100)
    tracer = StepTracer(buffer)
    with tracer.span("step", 7), tracer.span("forward"), tracer.span("prefill") as inner:
        assert inner is not None
        inner.args["tokens"] = 3
        inner.mark_compiled("captured")
    with tracer.span("prefill"):
        pass
    assert spans(buffer.events) == [
        ("prefill (captured)", 7),
        ("forward", 7),
        ("step", 7),
        ("prefill", None),
    ]
    first = next(event for event in buffer.events if event["ph"] == "X")
    assert first["cat"] == "compile"
    assert first["args"] == {"step": 7, "tokens": 3}


def test_a_span_that_fails_is_kept_and_names_the_error() -> None:
    buffer = EventBuffer(100)
    with pytest.raises(KeyError), StepTracer(buffer).span("plan", 1):
        raise KeyError
    assert buffer.events[-1]["args"] == {"step": 1, "error": "KeyError"}


def test_a_file_is_json_with_each_thread_named_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    tracer = StepTracer(EventFile(path))
    one_step(tracer, 1)
    thread = threading.Thread(target=one_step, args=(tracer, 2), name="device_0")
    thread.start()
    thread.join()
    tracer.counters("sequences", running=2, waiting=0)
    tracer.close()
    one_step(tracer, 3)
    events = json.loads(path.read_text())
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert sorted(names) == ["MainThread", "device_0", "engine-core"]
    assert {step for _, step in spans(events)} == {1, 2}
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"running": 2, "waiting": 0}]


def test_a_file_of_some_steps_is_complete_when_they_are_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    tracer = StepTracer(EventFile(path, range(3, 5)))
    for step in range(1, 9):
        one_step(tracer, step)
        tracer.counters("sequences", running=step)
    events = json.loads(path.read_text())
    assert {step for _, step in spans(events)} == {3, 4}
    assert [event["args"]["running"] for event in events if event["ph"] == "C"] == [3, 4]
    tracer.close()
    assert json.loads(path.read_text()) == events


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_a_trace_in_parts_is_one_document_in_order_with_names_first(count: int) -> None:
    events: list[Event] = [
        {"name": f"s{n}", "ph": "X", "ts": float((n * 7919) % 5003), "dur": 1.0, "args": {"text": "x" * 200}}
        for n in range(count)
    ]
    events.append({"name": "process_name", "ph": "M", "ts": 0, "args": {"name": "core"}})
    parts = list(trace_parts(events, {"steps": 3}))
    assert max(map(len, parts)) <= 300 * 1024
    found = json.loads(b"".join(parts))
    assert found["otherData"] == {"steps": 3}
    shown = found["traceEvents"]
    assert len(shown) == count + 1
    assert shown[0]["ph"] == "M"
    times = [event["ts"] for event in shown[1:]]
    assert times == sorted(times)


def no_device() -> Any:
    raise AssertionError("nobody asked for device activities")


def test_a_profile_has_the_steps_after_it_and_no_half_ones() -> None:
    tracer = StepTracer()
    profiler = Profiler(tracer, max_events=1000, device=no_device)
    one_step(tracer, 1)
    profiler.start(StartProfile(5, 2, 60.0), launched=2)
    for step in (2, 3, 4):
        one_step(tracer, step)
        with tracer.span("plan", step + 1):
            pass
        assert list(profiler.due()) == []
        profiler.ended(step)
    messages = list(profiler.due())
    assert messages[-1] == ProfileEnd(5, 2, 0)
    found = document(messages)
    assert {step for _, step in spans(found["traceEvents"])} == {3, 4}
    assert found["otherData"]["steps"] == 2
    assert not tracer.on
    assert profiler.remaining is None
    assert list(profiler.due()) == []


def test_a_profile_of_an_idle_core_ends_with_its_time() -> None:
    profiler = Profiler(StepTracer(), max_events=1000, device=no_device)
    profiler.start(StartProfile(1, 10, 0.001), launched=0)
    assert profiler.remaining is not None
    while profiler.remaining:
        pass
    messages = list(profiler.due())
    assert messages[-1] == ProfileEnd(1, 0, 0)
    assert document(messages)["traceEvents"][0]["args"] == {"name": "engine-core"}


def test_what_has_no_room_is_counted() -> None:
    tracer = StepTracer()
    profiler = Profiler(tracer, max_events=6, device=no_device)
    profiler.start(StartProfile(1, 3, 60.0), launched=0)
    for step in (1, 2, 3):
        one_step(tracer, step)
        profiler.ended(step)
    messages = list(profiler.due())
    # The names of the process and of the thread, and four of the nine spans.
    assert messages[-1] == ProfileEnd(1, 3, 5)
    assert len(document(messages)["traceEvents"]) == 6


def test_a_cancelled_profile_is_gone_and_an_old_id_cancels_nothing() -> None:
    tracer = StepTracer()
    profiler = Profiler(tracer, max_events=100, device=no_device)
    profiler.start(StartProfile(1, 1, 60.0), launched=0)
    profiler.cancel(CancelProfile(1))
    assert not tracer.on
    profiler.start(StartProfile(2, 1, 60.0), launched=0)
    profiler.cancel(CancelProfile(1))
    one_step(tracer, 1)
    profiler.ended(1)
    assert list(profiler.due())[-1] == ProfileEnd(2, 1, 0)


def test_device_activities_are_merged_and_end_with_the_profile() -> None:
    running: list[str] = []

    @contextmanager
    def device() -> Iterator[list[Event]]:
        events: list[Event] = []
        running.append("begun")
        yield events
        running.append("ended")
        events.append({"name": "gemm", "cat": "kernel", "ph": "X", "ts": 1.0, "dur": 2.0, "pid": 9, "tid": 1})

    tracer = StepTracer()
    profiler = Profiler(tracer, max_events=100, device=device)
    profiler.start(StartProfile(1, 1, 60.0, device_activities=True), launched=0)
    one_step(tracer, 1)
    profiler.ended(1)
    names = {event["name"] for event in document(list(profiler.due()))["traceEvents"]}
    assert {"gemm", "forward"} <= names
    profiler.start(StartProfile(2, 1, 60.0, device_activities=True), launched=1)
    profiler.cancel(CancelProfile(2))
    assert running == ["begun", "ended"] * 2


@pytest.mark.parametrize("at_end", [False, True])
def test_a_device_profiler_that_fails_ends_the_profile_with_a_reason(at_end: bool) -> None:
    @contextmanager
    def device() -> Iterator[list[Event]]:
        if not at_end:
            raise RuntimeError("the profiler is taken")
        yield []
        raise RuntimeError("the profiler is broken")

    tracer = StepTracer()
    profiler = Profiler(tracer, max_events=100, device=device)
    profiler.start(StartProfile(1, 1, 60.0, device_activities=True), launched=0)
    one_step(tracer, 1)
    profiler.ended(1)
    assert list(profiler.due()) == [ProfileEnd(1, error="The device's profiler failed: RuntimeError.")]
    assert list(profiler.due()) == []
    assert not tracer.on
