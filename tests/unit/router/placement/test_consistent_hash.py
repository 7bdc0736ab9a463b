"""Consistent hash with bounded load."""

from __future__ import annotations

import math
from collections import Counter

from services.router.placement.consistent_hash import KEY_TOKENS, key_of
from tests.support.placement import World, request


def owners(world: World, keys: int) -> dict[int, str]:
    return {key: world.place(request(session_id=f"s{key}")).engine.name for key in range(keys)}


def test_a_key_stays_and_only_the_keys_of_one_that_leaves_move():
    world = World("consistent_hash", 8)
    before = owners(world, 400)
    assert owners(world, 400) == before
    assert set(Counter(before.values())) == {f"e{number}" for number in range(8)}
    world.leave(world.engines[3])
    after = owners(world, 400)
    assert {key for key in before if before[key] != after[key]} == {k for k in before if before[k] == "e3"}
    world.now += 1
    world.attach("e3")
    assert owners(world, 400) == before


def test_keys_are_spread_about_evenly():
    counts = Counter(owners(World("consistent_hash", 8), 2000).values())
    assert max(counts.values()) < 1.35 * 2000 / 8


def test_routers_agree_without_talking():
    assert owners(World("consistent_hash", 5, seed=1), 50) == owners(World("consistent_hash", 5, seed=2), 50)


def test_load_is_bounded_when_all_have_one_key():
    world = World("consistent_hash", 8)
    for number in range(1, 200):
        world.take(request(session_id="one"))
        bound = math.ceil(1.25 * number / 8)
        assert max(engine.placed_sequences for engine in world.engines) <= bound


def test_the_overflow_of_a_key_goes_to_the_same_engine_as_well():
    world = World("consistent_hash", 8)
    first = world.place(request(session_id="k")).engine
    first.placed_sequences = 50
    second = {world.place(request(session_id="k")).engine for _ in range(20)}
    assert len(second) == 1
    assert second != {first}


def test_a_request_for_more_than_any_bound_goes_to_an_idle_one():
    world = World("consistent_hash", 2)
    world.engines[0].placed_sequences = 5
    assert world.place(request(sequences=90)).engine is world.engines[1]


def test_the_key_is_the_session_or_how_the_prompt_begins_and_never_its_length():
    start = list(range(KEY_TOKENS))
    assert key_of(request(tokens=start)) == key_of(request(tokens=[*start, 1, 2, 3]))
    assert key_of(request(tokens=start)) != key_of(request(tokens=[5, *start[1:]]))
    assert key_of(request(tokens=[1] * 40)) != key_of(request(tokens=[2] * 40))
    assert key_of(request(tokens=start, salt=b"x")) != key_of(request(tokens=start))
    assert key_of(request(tokens=[1], session_id="s")) == key_of(request(tokens=[2], session_id="s"))


def test_engines_of_one_name_share_the_keys():
    world = World("consistent_hash")
    for _ in range(4):
        world.now += 1
        world.attach("same")
    epochs = Counter(world.place(request(session_id=f"s{key}")).engine.epoch for key in range(400))
    assert len(epochs) == 4
    assert min(epochs.values()) > 60
