"""Least loaded placement."""

from __future__ import annotations

from collections import Counter

from tests.support.placement import World, request


def test_ties_are_drawn_at_random():
    world = World("least_loaded", 3)
    picked = Counter(world.place(request()).engine.name for _ in range(300))
    assert min(picked.values()) > 60


def test_load_placed_since_the_report_counts_at_once():
    world = World("least_loaded", 2)
    for _ in range(50):
        world.take(request())
    assert [engine.placed_sequences for engine in world.engines] == [25, 25]


def test_others_load_counts_by_the_report():
    world = World("least_loaded", 2)
    busy, idle = world.engines
    world.report(busy, running=3)
    for _ in range(3):
        assert world.take(request(tokens=[1])).engine is idle
    idle.placed_sequences += 1
    assert world.place(request()).engine is busy


def test_unequal_engines_fill_up_alike():
    world = World("least_loaded")
    small, large = world.attach("s", slots=10), world.attach("l", slots=30)
    for _ in range(20):
        world.place(request()).engine.placed_sequences += 1
    assert (small.placed_sequences, large.placed_sequences) == (5, 15)


def test_a_long_prompt_weighs_more_than_a_short_one():
    world = World("least_loaded", 2)
    first, second = world.engines
    first.placed_sequences, first.placed_tokens = 1, 9000
    second.placed_sequences, second.placed_tokens = 3, 240
    assert world.place(request()).engine is second
