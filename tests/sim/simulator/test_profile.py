"""A profile of an engine on the simulated HPU: the trace says when the card compiled, captured, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.link import ProfileEnd, ProfilePart, StartProfile
from tests.sim.conftest import NewCard
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options

STEPS = 6


def profile(core: LocalCore, number: int, *, device_activities: bool = False) -> list[dict[str, Any]]:
    core.loop.handle(StartProfile(number, STEPS, 100.0, device_activities))
    for length in (3, 5, 11):
        core.submit([5 + length] * length, max_tokens=STEPS + 2)
    core.run()
    core.loop.send_profile()
    mine = [m for m in core.link.sent if isinstance(m, ProfilePart | ProfileEnd) and m.id == number]
    assert mine[-1] == ProfileEnd(number, STEPS)
    parts = (message.data for message in mine if isinstance(message, ProfilePart))
    events: list[dict[str, Any]] = json.loads(b"".join(parts))["traceEvents"]
    return events


def test_captures_and_compilations_are_in_the_spans_that_they_delay(
    new_card: NewCard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    # The engine opens a card of its own: not one that another test of this machine holds.
    monkeypatch.setenv("CATENARY_SIM", f"lock_directory={tmp_path}")
    new_card()
    directory = save_tiny_model("llama", tmp_path / "model")
    core = LocalCore(tiny_options(directory, device="sim", warmup="skip"))
    first = profile(core, 1)
    captured = [event for event in first if event["name"] in ("prefill (captured)", "decode (captured)")]
    assert captured
    assert {event["cat"] for event in captured} == {"compile"}
    steps = {event["args"]["step"]: event["args"] for event in first if event["name"] == "step"}
    assert all(steps[event["args"]["step"]]["compilations"] for event in captured)
    again = profile(core, 2, device_activities=True)
    decodes = [event for event in again if event["name"] == "decode" and event["cat"] == "device"]
    assert {event["args"]["way"] for event in decodes} == {"replayed"}
    # The host's side of the card's operations, beside the spans.
    assert any(event.get("cat") == "cpu_op" for event in again)
    core.engine.close()
