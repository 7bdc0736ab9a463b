"""Session affinity: where a session stays, when it moves, and how many are remembered."""

from __future__ import annotations

from tests.support.placement import World, request


def test_a_session_stays_where_it_began():
    world = World("session", 4)
    first = world.take(request(session_id="s"))
    for _ in range(10):
        world.take(request())
        placed = world.take(request(session_id="s"))
        assert placed.engine is first.engine
        assert placed.receipt.reason == "session"


def test_it_follows_when_its_engine_dies_and_stays_there():
    world = World("session", 3)
    first = world.take(request(session_id="s")).engine
    world.leave(first)
    second = world.take(request(session_id="s")).engine
    assert second is not first
    world.now += 1
    world.attach(first.name)
    assert world.take(request(session_id="s")).engine is second


def test_it_moves_when_its_engine_is_full_or_overloaded():
    world = World("session", 3, skew_sequences=10)
    first = world.take(request(session_id="s")).engine
    first.placed_sequences = 100
    second = world.take(request(session_id="s")).engine
    assert second is not first
    first.placed_sequences = 0
    assert world.place(request(session_id="s")).engine is second
    second.placed_sequences = 60
    assert world.place(request(session_id="s")).engine is not second


def test_two_models_have_two_sessions():
    world = World("session", 1)
    other = world.attach("n", model="n")
    assert world.take(request(session_id="s", model="n")).engine is other
    assert world.take(request(session_id="s")).engine is world.engines[0]
    assert world.take(request(session_id="s", model="n")).receipt.reason == "session"


def test_a_session_without_sequences_is_forgotten_in_time():
    world = World("session", 1, session_ttl_s=60)
    reasons = []
    for wait in (0, 50, 50, 61):
        world.now += wait
        reasons.append(world.place(request(session_id="s")).receipt.reason == "session")
    assert reasons == [False, True, True, False]


def test_so_many_are_remembered_and_the_longest_unused_goes():
    world = World("session", 1, max_sessions=3)
    for number in (0, 1, 2, 0, 3):
        world.place(request(session_id=f"s{number}"))
    assert len(world.policy) == 3
    known = [world.place(request(session_id=f"s{n}")).receipt.reason == "session" for n in (0, 2, 3)]
    assert known == [True, True, True]
    assert world.place(request(session_id="s1")).receipt.reason != "session"
