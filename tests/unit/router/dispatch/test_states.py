"""The state machine of a sequence: each row of the table, illegal events, and any order of events."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from catenary.v1 import common_pb2
from services.router.admission import Ledger, LoadGuard
from services.router.dispatch.sequence import NULL_SINK, EngineLink, LiveSequence, Target
from services.router.dispatch.states import (
    EVENTS,
    FINAL,
    ON_ENGINE,
    STATES,
    TRANSITIONS,
    Action,
    IllegalEvent,
    SequenceEvent,
    SequenceState,
)
from services.router.fleet import Fleet
from services.router.placement import placement_request
from tests.support.dispatcher import hello

TOKENS, UNCACHED, KV_TOKENS = 5, 3, 4
ROOT = Path(__file__).resolve().parents[4]


class CountingGuard(LoadGuard):
    """Counts how often it is released."""

    __slots__ = ("releases",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, TOKENS)
        self.releases = 0

    def release(self) -> None:
        self.releases += 1
        super().release()


class Machine:
    """A sequence, and the two engines on which it is placed in turn."""

    def __init__(self) -> None:
        fleet = Fleet(lease_s=5)
        self.links = [EngineLink(fleet.attach(hello(name), now=0.0, unix_time=0.0)[0]) for name in ("a", "b")]
        self.ledger = Ledger()
        self.guard = CountingGuard(self.ledger)
        spec = common_pb2.SequenceSpec(model="m", token_ids=[1] * TOKENS, request_id="s")
        request = placement_request(spec)
        request.uncached_tokens = UNCACHED
        self.sequence = LiveSequence(1, spec, NULL_SINK, self.guard, request)
        self.placements = 0

    def apply(self, event: SequenceEvent) -> None:
        target = None
        if event in (SequenceEvent.PLACE, SequenceEvent.PLACE_PROMPT):
            target = Target(self.links[self.placements % 2], self.placements + 10, KV_TOKENS)
        self.sequence.apply(event, target)
        self.placements += target is not None

    def load(self) -> tuple[object, ...]:
        """Everything that an event may change."""
        engines = [link.engine for link in self.links]
        return (
            self.sequence.state,
            self.ledger.sequences,
            self.ledger.tokens,
            self.guard.releases,
            [engine.placed_sequences for engine in engines],
            [engine.placed_tokens for engine in engines],
            [engine.placed_prefill for engine in engines],
            [engine.kv.held for engine in engines],
            [list(link.sequences) for link in self.links],
        )

    def check(self) -> None:
        """The load is that of the state: on one engine at the most, and live until the end."""
        state, engines = self.sequence.state, [link.engine for link in self.links]
        on_engine = state in ON_ENGINE
        assert sum(engine.placed_sequences for engine in engines) == on_engine
        assert sum(engine.placed_tokens for engine in engines) == on_engine * TOKENS
        assert sum(engine.kv.held for engine in engines) == on_engine * KV_TOKENS
        assert [handle for link in self.links for handle in link.sequences] == [
            self.sequence.engine_handle for _ in range(on_engine)
        ]
        assert self.sequence.engine is (self.sequence.link.engine if on_engine else None)
        assert self.ledger.sequences == (state not in FINAL)
        assert self.guard.releases == (state in FINAL)


def paths() -> dict[SequenceState, list[SequenceEvent]]:
    """The shortest events that lead to each state."""
    found: dict[SequenceState, list[SequenceEvent]] = {SequenceState.ADMITTED: []}
    todo = deque(found)
    while todo:
        state = todo.popleft()
        for (before, event), (after, _) in TRANSITIONS.items():
            if before is state and after not in found:
                found[after] = [*found[state], event]
                todo.append(after)
    return found


PATHS = paths()


def machine_in(state: SequenceState) -> Machine:
    machine = Machine()
    for event in PATHS[state]:
        machine.apply(event)
    assert machine.sequence.state is state
    return machine


def test_every_state_is_reached_and_described():
    assert set(PATHS) == set(SequenceState) == set(STATES)
    assert set(EVENTS) == set(SequenceEvent) == {event for _, event in TRANSITIONS}


@pytest.mark.parametrize(("row", "transition"), TRANSITIONS.items(), ids=lambda row: "-".join(map(str, row)))
def test_a_row_of_the_table_is_what_the_sequence_does(row, transition):
    state, event = row
    machine = machine_in(state)
    before = machine.load()
    engine, waiting = machine.sequence.engine, [link.engine.placed_prefill for link in machine.links]
    machine.apply(event)
    machine.check()
    assert machine.sequence.state is transition.state
    match transition.action:
        case Action.NONE:
            assert machine.load()[1:] == before[1:]
        case Action.LOAD:
            assert machine.sequence.engine not in (None, engine)
            assert machine.sequence.engine.placed_prefill == UNCACHED
        case Action.UNLOAD:
            assert engine is not None
            assert machine.sequence.engine is None
        case Action.PREFILLED:
            assert sum(waiting) == UNCACHED
            assert sum(link.engine.placed_prefill for link in machine.links) == 0
        case Action.RELEASE:
            assert machine.guard.releases == 1
            assert machine.ledger.tokens == 0


@pytest.mark.parametrize("state", SequenceState)
def test_an_event_that_the_table_does_not_have_is_refused_and_changes_nothing(state):
    machine = machine_in(state)
    for event in SequenceEvent:
        if (state, event) in TRANSITIONS:
            continue
        before = machine.load()
        with capture_logs() as logs, pytest.raises(IllegalEvent, match=f"is {state} has no event '{event}'"):
            machine.apply(event)
        assert machine.load() == before
        assert [(line["event"], line["illegal"]) for line in logs] == [("illegal event", event)]


def test_a_placement_needs_an_engine_and_nothing_else_has_one():
    machine = machine_in(SequenceState.PLACED)
    before = machine.load()
    with pytest.raises(IllegalEvent):
        machine.sequence.apply(SequenceEvent.PLACE)
    with pytest.raises(IllegalEvent):
        machine.sequence.apply(SequenceEvent.OUTPUT, Target(machine.links[0], 99, KV_TOKENS))
    assert machine.load() == before


def test_nothing_follows_a_final_state_and_every_other_one_can_end():
    for state in SequenceState:
        legal = {event for before, event in TRANSITIONS if before is state}
        if state in FINAL:
            assert not legal
        else:
            assert legal & {SequenceEvent.END, SequenceEvent.REFUSE}


@given(st.lists(st.sampled_from(SequenceEvent), max_size=40))
def test_any_events_end_a_sequence_once_and_release_its_load_once(events):
    machine = Machine()
    for event in events:
        before = machine.load()
        if (machine.sequence.state, event) in TRANSITIONS:
            machine.apply(event)
        else:
            with pytest.raises(IllegalEvent):
                machine.apply(event)
            assert machine.load() == before
        machine.check()
    if machine.sequence.state not in FINAL:
        end = SequenceEvent.END
        machine.apply(end if (machine.sequence.state, end) in TRANSITIONS else SequenceEvent.REFUSE)
    machine.check()
    assert machine.sequence.state in FINAL
    assert machine.guard.releases == 1
    assert machine.ledger == Ledger() or (machine.ledger.sequences, machine.ledger.tokens) == (0, 0)
    assert all(link.engine.placed_prefill == 0 for link in machine.links)


def test_the_sequence_alone_changes_its_state():
    writers = {
        path.name
        for path in (ROOT / "services" / "router" / "dispatch").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    }
    assert writers == {"sequence.py"}
