"""The default policy: cached prefixes against queues."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.placement import World, request

PROMPT = range(400)


def test_ties_are_drawn_at_random():
    world = World("cost", 3)
    picked = Counter(world.place(request()).engine.name for _ in range(300))
    assert min(picked.values()) > 60


def test_a_cached_prefix_is_worth_some_queue_and_not_more():
    world = World("cost", 2)
    warm, cold = world.engines
    asked = request(tokens=PROMPT)
    world.caches(warm, asked, 100)
    world.report(cold)
    world.report(warm, pending_prefill_tokens=300)
    placed = world.place(asked)
    assert placed.engine is warm
    assert (placed.receipt.reason, placed.receipt.matched_tokens) == ("lowest_cost", 399)
    world.report(warm, pending_prefill_tokens=500)
    assert world.place(asked).engine is cold


def test_what_was_sent_since_the_report_counts_until_it_is_computed():
    world = World("cost", 2)
    first, second = world.engines
    first.placed_sequences, first.placed_tokens, first.placed_prefill = 1, 300, 300
    second.placed_sequences, second.placed_tokens = 1, 300
    assert world.place(request()).engine is second
    first.placed_prefill = 0
    assert {world.place(request(tokens=[n] * 8)).engine for n in range(30)} == {first, second}


def test_a_burst_with_one_prefix_spreads():
    world = World("cost", 4)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 90)
    for _ in range(40):
        world.take(request(tokens=PROMPT))
    counts = [engine.placed_sequences for engine in world.engines]
    assert min(counts) > 4
    assert max(counts) < 20


def test_short_matches_count_for_nothing():
    world = World("cost", 2)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 40)
    world.report(world.engines[0], pending_prefill_tokens=10)
    placed = world.place(asked)
    assert placed.engine is world.engines[1]
    assert placed.receipt.reason == "least_loaded"


def test_a_prefix_on_an_overloaded_engine_counts_for_nothing():
    world = World("cost", 4, pressure_weight=0, decode_weight=0, skew_sequences=20)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 100)
    world.report(world.engines[0], running=10)
    assert world.place(asked).engine is world.engines[0]
    world.report(world.engines[0], running=80, pending_prefill_tokens=1)
    placed = world.place(asked)
    assert placed.engine is not world.engines[0]
    assert placed.receipt.reason == "least_loaded"


@pytest.mark.parametrize("full", [{"running": 95}, {"running": 1, "used_blocks": 9500}])
def test_an_engine_without_kv_or_slots_is_avoided(full):
    world = World("cost", 2)
    asked = request(tokens=PROMPT)
    world.caches(world.engines[0], asked, 100)
    world.report(world.engines[0], **full)
    assert world.place(asked).engine is world.engines[1]


def test_a_stale_report_counts_as_saturated():
    world = World("cost", 2, stale_s=2)
    busy, silent = world.engines
    world.now += 3
    world.report(busy, running=90, pending_prefill_tokens=5000)
    assert world.place(request()).engine is busy
    world.report(silent)
    assert world.place(request()).engine is silent
    world.now += 3
    assert world.place(request()).engine is silent


def test_a_restarted_engine_does_not_attract_everything():
    """sglang 14532: on a miss the emptiest one won, so that all went to the one that had just started."""
    world = World("cost", 8)
    prompts = {number: [number] * 400 for number in range(160)}
    for number, tokens in prompts.items():
        engine = world.engines[number % 8]
        engine.placed_sequences += 1
        engine.placed_tokens += 400
        world.index.stored(engine, request(tokens=tokens).names(4))
    for engine in world.engines:
        world.index.completed(engine)
    world.leave(world.engines[3])
    world.now += 1
    fresh = world.attach("e3")
    for engine in world.fleet:
        world.report(engine, running=engine.placed_sequences)
    warm = [request(tokens=[*tokens, 1]) for number, tokens in prompts.items() if number % 8 != 3][:40]
    assert sum(world.take(asked).engine is fresh for asked in warm) <= 2
    cold = Counter(world.take(request(tokens=[1000 + n] * 400)).engine.name for n in range(80))
    assert cold["e3"] < 40
    assert len(cold) > 4


def test_engines_that_tell_nothing_are_guessed_at():
    world = World("cost", 4)
    first = world.take(request(tokens=PROMPT)).engine
    first.placed_prefill = 0
    placed = world.place(request(tokens=[*PROMPT, 1]))
    assert placed.engine is first
    assert placed.receipt.matched_tokens == 400
    assert not placed.receipt.candidates[0].match_is_exact


def test_an_engine_that_tells_is_believed_rather_than_remembered():
    world = World("cost", 1)
    (engine,) = world.engines
    world.take(request(tokens=PROMPT))
    assert world.place(request(tokens=PROMPT)).receipt.matched_tokens == 399
    world.caches(engine, request(tokens=PROMPT), 10)
    assert world.place(request(tokens=PROMPT)).receipt.matched_tokens == 40
    world.index.incomplete(engine)
    assert world.place(request(tokens=PROMPT)).receipt.matched_tokens == 399
