from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.device.profiling import shown_events
from services.engine.link import ProfileEnd, ProfilePart, StartProfile
from tests.support.graph_device import GraphDevice
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12], [30] * 20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def profiled(core: LocalCore, steps: int, *, device_activities: bool = False) -> list[dict[str, Any]]:
    core.loop.handle(StartProfile(1, steps, 60.0, device_activities))
    for prompt in PROMPTS:
        core.submit(list(prompt), max_tokens=8)
    while core.turn() is not None or core.loop.work.busy:
        core.loop.send_profile()
    parts = [message for message in core.link.sent if isinstance(message, ProfilePart)]
    ends = [message for message in core.link.sent if isinstance(message, ProfileEnd)]
    assert ends == [ProfileEnd(1, steps)]
    events: list[dict[str, Any]] = json.loads(b"".join(part.data for part in parts))["traceEvents"]
    return events


def test_a_profile_shows_the_work_and_the_padding_of_each_forward(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    before = core.engine.graphs.padding
    events = profiled(core, 6)
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == set(range(1, 7))
    for name in ("plan", "prepare", "wait", "commit", "step", "forward", "sample", "copy"):
        assert len([span for span in spans if span["name"] == name]) >= 6
    forwards = [span for span in spans if span["name"] in ("prefill", "decode")]
    assert sum(span["args"]["tokens"] for span in forwards if span["name"] == "prefill") == 28
    for span in forwards:
        args = span["args"]
        assert args["tokens"] + args["padding_tokens"] == args["batch"] * args["query"]
        rows = args["batch"] if span["name"] == "prefill" else 1
        assert args["blocks"] + args["padding_blocks"] == args["context_blocks"] * rows
        assert args["way"] == "eager"
    shown = sum(span["args"]["padding_tokens"] for span in forwards)
    assert shown <= before.prefill.padding_tokens + before.decode.padding_tokens
    counters = [event for event in events if event["name"] == "sequences"]
    assert {"running", "waiting"} == set(counters[0]["args"])
    assert any(event["args"]["used"] > 0 for event in events if event["name"] == "KV blocks")


def test_captures_are_marked_where_they_happen_and_replays_are_not(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, warmup="skip"), GraphDevice())
    events = profiled(core, 8)
    computed = [event for event in events if event.get("cat") in ("device", "compile")]
    captured = [event for event in computed if event["cat"] == "compile"]
    assert captured
    for event in captured:
        assert event["name"].endswith(" (captured)")
        assert event["args"]["way"] == "captured"
    replayed = [event for event in computed if event["args"]["way"] == "replayed"]
    assert replayed
    assert all(event["name"] in ("prefill", "decode", "head", "clear") for event in replayed)


def test_the_cpu_tells_its_operations_beside_the_forwards_they_belong_to(directory: Path) -> None:
    core = LocalCore(tiny_options(directory, cpu_kernels="torch"))
    events = profiled(core, 3, device_activities=True)
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    matmuls = [event for event in operations if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert matmuls
    assert not {event["pid"] for event in operations} & {e["pid"] for e in events if e.get("cat") == "step"}
    # A millisecond is far more than the clocks differ by, and far less than the profile is long.
    steps = [event for event in events if event["name"] == "step"]
    last = max(step["ts"] + step["dur"] for step in steps)
    for operation in matmuls:
        begin, end = operation["ts"], operation["ts"] + operation["dur"]
        # The step after the last one may have begun.
        assert begin > last - 1000 or any(
            step["ts"] - 1000 <= begin and end <= step["ts"] + step["dur"] + 1000 for step in steps
        )


def test_activities_without_a_common_clock_are_left_out_and_foreign_processes_get_numbers() -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": "catenary clock", "ts": 50.0, "dur": 1, "pid": 7}
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": 80.0,
        "dur": 5,
        "pid": "stream",
        "tid": "HPU 0",
    }
    named = {"ph": "M", "name": "thread_name", "pid": "stream", "tid": "HPU 0", "args": {"name": "compute"}}
    assert list(shown_events([kernel, named], 1000.0)) == []
    process, thread, shown = shown_events([{**mark, "tid": 7}, kernel, named], 1000.0)
    assert process["args"] == {"name": "torch profiler: stream"}
    assert thread["args"] == {"name": "compute"}
    assert (shown["ts"], shown["dur"], shown["pid"]) == (1030.0, 5, process["pid"])
    assert isinstance(shown["pid"], int)
    assert isinstance(shown["tid"], int)
