"""A step's result is held back until the next forward begins, and never for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from services.engine.runner.execution import StepGate


def test_a_lone_step_is_looked_at_once_it_has_ended() -> None:
    gate = StepGate()
    gate.given(1)
    gate.begins(1)
    gate.forward_begins()
    assert gate.waits(1)
    gate.ended(1)
    gate.wait(1)


def test_with_another_behind_it_once_that_ones_forward_begins() -> None:
    gate = StepGate()
    gate.given(1)
    gate.begins(1)
    gate.given(2)
    gate.ended(1)
    assert gate.waits(1)
    gate.begins(2)
    assert gate.waits(1)
    gate.forward_begins()
    gate.wait(1)
    assert gate.waits(2)


def test_a_step_without_a_forward_lets_the_one_before_go_at_its_end() -> None:
    gate = StepGate()
    gate.given(1)
    gate.given(2)
    gate.ended(1)
    gate.begins(2)
    gate.ended(2)
    gate.wait(1)
    gate.wait(2)


def test_a_step_that_waits_for_masks_lets_the_one_before_go_whatever_its_forward_told() -> None:
    gate = StepGate()
    gate.given(1)
    gate.given(2)
    gate.ended(1)
    gate.begins(2)
    gate.computed(2)
    gate.wait(1)
    assert gate.waits(2)


def test_a_step_that_the_device_never_got_holds_up_nobody() -> None:
    gate = StepGate()
    gate.given(1)
    gate.ended(1)
    gate.given(2)
    gate.ended(2)
    gate.wait(1)
    gate.wait(2)


def test_what_was_never_given_is_not_waited_for() -> None:
    StepGate().wait(7)


def test_two_threads() -> None:
    gate = StepGate()
    seen: list[tuple[str, int]] = []

    def compute(step: int) -> None:
        gate.begins(step)
        gate.forward_begins()
        seen.append(("forward", step))
        gate.ended(step)

    with ThreadPoolExecutor(1) as device:
        last = 200
        gate.given(1)
        device.submit(compute, 1)
        for step in range(2, last + 1):
            gate.given(step)
            device.submit(compute, step)
            gate.wait(step - 1)
            seen.append(("looked", step - 1))
        gate.wait(last)
    assert [step for what, step in seen if what == "forward"] == list(range(1, last + 1))
    assert [step for what, step in seen if what == "looked"] == list(range(1, last))
    # Nothing is kept of what was looked at.
    assert len(gate) == 0
