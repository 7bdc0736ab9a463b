"""Round robin placement."""

from __future__ import annotations

from tests.support.placement import World, request


def test_each_has_its_turn_whatever_its_load():
    world = World("round_robin", 3)
    world.report(world.engines[0], running=50)
    assert [world.take(request()).engine.name for _ in range(7)] == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]


def test_one_that_left_gets_no_share_and_one_that_joins_does():
    world = World("round_robin", 3)
    assert world.take(request()).engine.name == "e0"
    world.leave(world.engines[1])
    assert [world.take(request()).engine.name for _ in range(3)] == ["e2", "e0", "e2"]
    world.attach("e3")
    assert [world.take(request()).engine.name for _ in range(3)] == ["e3", "e0", "e2"]


def test_a_full_one_is_passed_over():
    world = World("round_robin", 3)
    world.engines[1].placed_sequences = 100
    assert [world.take(request()).engine.name for _ in range(4)] == ["e0", "e2", "e0", "e2"]


def test_each_model_has_its_own_turns():
    world = World("round_robin", 2)
    world.attach("n0", model="n")
    world.attach("n1", model="n")
    names = [world.take(request(model=model)).engine.name for model in "mnmn"]
    assert names == ["e0", "n0", "e1", "n1"]
