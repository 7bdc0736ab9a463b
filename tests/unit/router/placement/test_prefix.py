"""Exact and approximate longest prefix."""

from __future__ import annotations

import pytest

from tests.support.placement import World, request

PROMPT = range(40)


def test_exact_goes_where_the_prompt_is():
    world = World("prefix_exact", 4)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[2], asked, 9)
    world.caches(world.engines[1], asked, 6)
    world.report(world.engines[2], running=20)
    placed = world.take(asked)
    assert placed.engine is world.engines[2]
    assert (placed.receipt.reason, placed.receipt.matched_tokens) == ("prefix", 36)
    assert asked.uncached_tokens == 4


def test_exact_forgets_what_is_removed_and_who_left():
    world = World("prefix_exact", 2)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 9)
    world.index.cleared(world.engines[0])
    assert world.place(asked).receipt.reason == "least_loaded"
    world.caches(world.engines[0], asked, 9)
    world.leave(world.engines[0])
    assert world.place(asked).receipt.matched_tokens == 0


def test_exact_does_not_guess():
    world = World("prefix_exact", 2)
    world.take(request(tokens=PROMPT))
    assert world.place(request(tokens=PROMPT)).receipt.matched_tokens == 0


def test_approximate_goes_where_it_sent_the_prompt_before():
    world = World("prefix_approximate", 4)
    first = world.take(request(tokens=PROMPT)).engine
    for _ in range(5):
        placed = world.take(request(tokens=[*PROMPT, 1, 2, 3]))
        assert placed.engine is first
        assert (placed.receipt.reason, placed.receipt.matched_tokens) == ("prefix", 40)
        assert not placed.receipt.candidates[0].match_is_exact


def test_approximate_remembers_no_more_than_an_engine_can_hold():
    world = World("prefix_approximate")
    world.attach("small", total_blocks=10)
    first, second = range(40), range(100, 140)
    world.take(request(tokens=first))
    assert world.place(request(tokens=first)).receipt.matched_tokens == 39
    world.take(request(tokens=second))
    assert world.place(request(tokens=second)).receipt.matched_tokens == 39
    assert world.place(request(tokens=[*first, 0])).receipt.matched_tokens == 0


@pytest.mark.parametrize("policy", ["prefix_exact", "prefix_approximate"])
def test_a_short_match_is_not_worth_a_queue(policy):
    world = World(policy, 2)
    asked = request(tokens=PROMPT)
    for engine, blocks in zip(world.engines, (4, 0), strict=True):
        world.caches(engine, asked, blocks)
        if blocks:
            world.prefixes.sent(request(tokens=PROMPT[:16]), engine)
    world.report(world.engines[0], running=5)
    placed = world.place(asked)
    assert placed.engine is world.engines[1]
    assert placed.receipt.reason == "least_loaded"


@pytest.mark.parametrize("policy", ["prefix_exact", "prefix_approximate"])
def test_a_prefix_on_an_overloaded_engine_is_left(policy):
    world = World(policy, 4)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 10)
    world.prefixes.sent(asked, world.engines[0])
    assert world.place(asked).engine is world.engines[0]
    world.report(world.engines[0], running=80)
    assert world.place(request(tokens=PROMPT)).engine is not world.engines[0]


def test_holders_of_the_same_prefix_share_the_load():
    world = World("prefix_exact", 4)
    asked = request(tokens=PROMPT)
    for engine in world.engines[:2]:
        world.caches(engine, asked, 10)
    for _ in range(20):
        world.take(request(tokens=PROMPT))
    assert [engine.placed_sequences for engine in world.engines] == [10, 10, 0, 0]
