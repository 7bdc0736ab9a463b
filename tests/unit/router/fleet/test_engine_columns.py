"""The columns's columns against the engines that they stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import engine_pb2
from services.router.fleet import Engine, Fleet
from services.router.fleet import has_room as fleet_has_room
from tests.support.placement import BLOCK, World

WEIGHED = ["placed_sequences", "placed_tokens", "placed_prefill", "stalled", "draining", "full"]
SERVING = engine_pb2.ENGINE_STATE_SERVING
events = st.lists(
    st.tuples(
        st.sampled_from([*WEIGHED, "reserved_for", "report", "attach", "again", "detach", "breaker", "look"]),
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    max_size=60,
)


def has_room(engine: Engine, sequences: int, tokens: int) -> bool:
    """The rule for one engine, in words of its own."""
    slots = engine.capacity.max_running
    if engine.full or engine.sequences + min(sequences, slots) > slots + engine.backlog:
        return False
    needed = -(-tokens // BLOCK) * BLOCK
    if tokens == 0 or needed > engine.kv_tokens:
        return tokens == 0
    more = needed if engine.publishes_kv else BLOCK
    return engine.sequences == 0 or engine.kv.held + more <= engine.kv_tokens


def check(fleet: Fleet) -> None:
    columns = fleet.columns("m")
    assert list(columns.engines) == [engine for engine in fleet if engine.model.name == "m"]
    for row, engine in enumerate(columns.engines):
        assert columns.sequences[row] == engine.sequences
        assert columns.tokens[row] == engine.tokens
        assert columns.prefill[row] == engine.prefill
        assert columns.room[row] == engine.room
        assert columns.reported_at[row] == engine.reported_at
        assert columns.row_of(engine.epoch) == row
    available = [engine for engine in columns.engines if engine.available]
    assert fleet.candidates("m") == available
    assert fleet.candidates("m", excluding=available[:1]) == available[1:]
    for sequences, tokens in ((1, 0), (2, 0), (1, 1), (1, 38_000), (3, 40_000), (1, 40_001)):
        roomy = [has_room(engine, sequences, tokens) for engine in columns.engines]
        assert columns.roomy(sequences, tokens).tolist() == roomy
        assert [fleet_has_room(engine, sequences, tokens) for engine in columns.engines] == roomy
        if tokens:
            assert columns.roomy(sequences, np.full(len(columns), float(tokens))).tolist() == roomy
    kept = [engine.reserved_for for engine in columns.engines]
    assert columns.free_for("a").tolist() == [owner in (None, "a") for owner in kept]


@given(events)
@settings(max_examples=100, deadline=None)
def test_columns_say_what_the_engines_say(history):
    world = World("least_loaded", 2)
    world.attach("other", model="n")
    for what, which, value in history:
        engines: list[Engine] = list(world.fleet)
        engine = engines[which % len(engines)] if engines else None
        world.now += 1
        if what == "attach":
            world.attach(f"new{value}", model="mn"[which % 2], slots=1 + value, publishes_kv=value > 4)
        elif what == "look":
            check(world.fleet)
        elif engine is None:
            continue
        elif what == "again":
            hello = engine_pb2.EngineHello(
                instance_id=engine.instance_id, model=engine.model, capacity=engine.capacity, state=SERVING
            )
            world.fleet.attach(hello, now=world.now, unix_time=0)
        elif what == "detach":
            world.leave(engine)
        elif what == "report":
            world.report(engine, running=value, used_blocks=1111 * value, pending_prefill_tokens=value)
        elif what == "breaker":
            for _ in range(3):
                engine.breaker.failed(world.now)
            engine.touch()
        elif what == "reserved_for":
            engine.reserved_for = [None, "a", "b"][value % 3]
        elif what in ("stalled", "draining", "full"):
            setattr(engine, what, value > 4)
        else:
            setattr(engine, what, value)
    check(world.fleet)


def test_the_columns_are_the_same_until_one_joins_or_leaves():
    world = World("least_loaded", 2)
    columns = world.fleet.columns("m")
    world.engines[0].placed_sequences = 3
    world.attach("other", model="n")
    assert world.fleet.columns("m") is columns
    world.attach("new")
    assert world.fleet.columns("m") is not columns


def test_an_engine_that_left_is_kept_nowhere():
    world = World("least_loaded", 1)
    engine = world.engines[0]
    engine.placed_sequences = 1
    world.leave(engine)
    engine.placed_sequences = 0
    assert len(world.fleet.columns("m")) == 0
    assert engine.stale is None
