"""A step's result is held back until the next forward begins, and never for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from services.engine.runner.execution import StepTurns


def waits(turns: StepTurns, step: int) -> bool:
    """Whether `wait` would wait now."""
    event = turns._open.get(step)
    return event is not None and not event.is_set()


def test_a_lone_step_is_looked_at_once_it_has_ended() -> None:
    turns = StepTurns()
    turns.given(1)
    turns.begins(1)
    turns.forward_begins()
    assert waits(turns, 1)
    turns.ended(1)
    turns.wait(1)


def test_with_another_behind_it_once_that_ones_forward_begins() -> None:
    turns = StepTurns()
    turns.given(1)
    turns.begins(1)
    turns.given(2)
    turns.ended(1)
    assert waits(turns, 1)
    turns.begins(2)
    assert waits(turns, 1)
    turns.forward_begins()
    turns.wait(1)
    assert waits(turns, 2)


def test_a_step_without_a_forward_lets_the_one_before_go_at_its_end() -> None:
    turns = StepTurns()
    turns.given(1)
    turns.given(2)
    turns.ended(1)
    turns.begins(2)
    turns.ended(2)
    turns.wait(1)
    turns.wait(2)


def test_a_step_that_waits_for_masks_lets_the_one_before_go_whatever_its_forward_told() -> None:
    turns = StepTurns()
    turns.given(1)
    turns.given(2)
    turns.ended(1)
    turns.begins(2)
    turns.computed(2)
    turns.wait(1)
    assert waits(turns, 2)


def test_a_step_that_the_device_never_got_holds_up_nobody() -> None:
    turns = StepTurns()
    turns.given(1)
    turns.ended(1)
    turns.given(2)
    turns.ended(2)
    turns.wait(1)
    turns.wait(2)


def test_what_was_never_given_is_not_waited_for() -> None:
    StepTurns().wait(7)


def test_two_threads() -> None:
    turns = StepTurns()
    seen: list[tuple[str, int]] = []

    def compute(step: int) -> None:
        turns.begins(step)
        turns.forward_begins()
        seen.append(("forward", step))
        turns.ended(step)

    with ThreadPoolExecutor(1) as device:
        last = 200
        turns.given(1)
        device.submit(compute, 1)
        for step in range(2, last + 1):
            turns.given(step)
            device.submit(compute, step)
            turns.wait(step - 1)
            seen.append(("looked", step - 1))
        turns.wait(last)
    assert [step for what, step in seen if what == "forward"] == list(range(1, last + 1))
    assert [step for what, step in seen if what == "looked"] == list(range(1, last))
    # Nothing is kept of what was looked at.
    assert not turns._open
