"""Power of two choices."""

from __future__ import annotations

from tests.support.placement import World, request


def test_the_most_loaded_of_three_is_never_chosen_and_the_others_are():
    world = World("power_of_two", 3)
    world.report(world.engines[0], running=50)
    names = {world.place(request()).engine.name for _ in range(100)}
    assert names == {"e1", "e2"}


def test_it_is_nearly_even():
    world = World("power_of_two", 10)
    for _ in range(500):
        world.take(request())
    loads = [engine.placed_sequences for engine in world.engines]
    assert max(loads) - min(loads) <= 8


def test_two_choices_are_compared_not_one():
    world = World("power_of_two", 2)
    world.report(world.engines[0], running=1)
    assert {world.place(request()).engine.name for _ in range(50)} == {"e1"}
