"""The laws of all policies, and the reasons for no placement."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.fleet import Fleet
from services.router.placement import POLICIES, LeastLoaded, PlacementRequest, Placer, policy_named
from tests.support.placement import World, request

ALL = sorted(POLICIES)


def test_there_is_one_file_for_each_policy_of_the_list():
    assert ALL == [
        "consistent_hash",
        "cost",
        "least_loaded",
        "power_of_two",
        "prefix_approximate",
        "prefix_exact",
        "round_robin",
        "session",
    ]
    assert isinstance(policy_named("least_loaded", random.Random()), LeastLoaded)
    with pytest.raises(KeyError):
        policy_named("none", random.Random())


events = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 5), st.integers(1, 30)),
        st.tuples(st.just("exclude"), st.integers(0, 5), st.integers(0, 4)),
        st.tuples(st.just("report"), st.integers(0, 4), st.integers(0, 12)),
        st.tuples(st.just("state"), st.integers(0, 4), st.sampled_from(engine_pb2.EngineState.values()[1:])),
        st.tuples(st.just("cache"), st.integers(0, 4), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 20), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", ALL)
@given(events, st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_no_policy_picks_one_that_is_excluded_full_or_does_not_serve(policy, history, seed):
    world = World(policy, seed=seed, max_sessions=3, session_ttl_s=30)
    engines = [world.attach(f"e{number}", slots=3) for number in range(5)]
    for number, (what, first, second) in enumerate(history):
        if what == "report":
            world.report(engines[first], running=min(second, 3), waiting=max(0, second - 3))
        elif what == "state":
            world.report(engines[first], state=second)
        elif what == "cache":
            world.caches(engines[first], request(tokens=[first] * 40), second)
        elif what == "restart":
            world.leave(engines[first])
            engines[first] = world.attach(f"e{first}", slots=3)
        elif what == "wait":
            world.now += first
        else:
            excluded = [engines[second]] if what == "exclude" else []
            tokens = [first] * (second if what == "place" else 10)
            asked = request(str(number), tokens, session_id="s" * (first % 3))
            can = [
                engine for engine in engines if engine.serving and engine.room >= 1 and engine not in excluded
            ]
            try:
                placed = world.take(asked, excluding=excluded)
            except Refused:
                assert not can
                continue
            assert placed.engine in can
            receipt = placed.receipt
            assert receipt.considered == len(can)
            assert receipt.policy == policy
            assert placed.engine.instance_id == receipt.chosen
            assert receipt.chosen in [candidate.instance_id for candidate in receipt.candidates]
            assert 0 <= receipt.matched_tokens < len(tokens)
            assert asked.uncached_tokens == len(tokens) - receipt.matched_tokens
            scores = [candidate.score for candidate in receipt.candidates]
            assert scores == [None] or scores == sorted(scores)


@pytest.mark.parametrize("policy", ALL)
def test_the_same_seed_makes_the_same_choices(policy):
    def choices() -> list[str]:
        world = World(policy, 7, seed=5)
        return [world.take(request(str(n), [n] * 9)).engine.name for n in range(50)]

    assert choices() == choices()


@pytest.mark.parametrize("policy", ALL)
def test_one_engine_gets_what_it_can_take(policy):
    world = World(policy, 1)
    assert {world.take(request(str(number))).engine for number in range(20)} == set(world.engines)


@pytest.mark.parametrize("policy", ALL)
def test_models_do_not_mix(policy):
    world = World(policy, 2)
    other = world.attach("other", model="n")
    assert {world.take(request(str(number), model="n")).engine for number in range(5)} == {other}
    assert world.take(request()).engine in world.engines


@pytest.mark.parametrize("full", [False, True])
def test_no_placement_is_retryable_and_says_when(full):
    world = World("least_loaded", 2)
    for engine in world.engines:
        if full:
            engine.placed_sequences = engine.capacity.max_running
        else:
            world.leave(engine)
    with pytest.raises(Refused) as caught:
        world.place(request())
    code = common_pb2.ERROR_CODE_OVERLOADED if full else common_pb2.ERROR_CODE_UNAVAILABLE
    assert caught.value.error.code == code
    assert caught.value.error.retryable
    assert caught.value.error.retry_after_ms == 50


def test_an_unknown_model_is_not_found():
    world = World("least_loaded", 1)
    with pytest.raises(Refused) as caught:
        world.place(request(model="other"))
    assert caught.value.error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
    assert not caught.value.error.retryable
    with pytest.raises(Refused) as caught:
        world.place(request(), excluding=world.engines)
    assert caught.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE


def test_roles_are_kept_apart():
    world = World("least_loaded", 0)
    prefill = world.attach("p", role=engine_pb2.ENGINE_ROLE_PREFILL)
    decode = world.attach("d", role=engine_pb2.ENGINE_ROLE_DECODE)
    assert world.placer.place(request(), role=engine_pb2.ENGINE_ROLE_PREFILL).engine is prefill
    assert world.place(request()).engine is decode


def test_a_model_may_have_a_policy_of_its_own():
    world = World("cost", 2)
    own = {"m": policy_named("round_robin", random.Random(0))}
    placer = Placer(world.fleet, world.policy, retry_after_ms=1, policies=own)
    assert placer.place(request()).receipt.policy == "round_robin"
    world.attach("x", model="n")
    assert placer.place(request(model="n")).receipt.policy == "cost"


def test_uncached_tokens_are_those_of_the_best_engine():
    world = World("cost", 2)
    asked = request(tokens=range(18))
    assert world.placer.uncached_tokens(asked) == 18
    world.caches(world.engines[0], asked, 1)
    world.caches(world.engines[1], asked, 3)
    assert world.placer.uncached_tokens(asked) == 6
    # All of it is cached, but the last token is always computed.
    whole = request(tokens=range(8))
    world.caches(world.engines[1], whole, 2)
    assert world.placer.uncached_tokens(whole) == 1
    assert world.placer.uncached_tokens(request(model="none")) == 8


def test_engines_with_other_blocks_are_compared_in_tokens():
    world = World("prefix_exact", 0)
    small, large = world.attach("s", block_size=4), world.attach("l", block_size=8)
    asked = request(tokens=range(33))
    world.caches(small, asked, 5)
    world.caches(large, asked, 3)
    placed = world.place(asked)
    assert placed.engine is large
    assert placed.receipt.matched_tokens == 24
    assert {c.engine_name: c.matched_tokens for c in placed.receipt.candidates} == {"s": 20, "l": 24}
    assert all(c.match_is_exact for c in placed.receipt.candidates)


def test_a_request_needs_no_more_than_its_fields():
    fleet = Fleet(lease_s=5)
    with pytest.raises(Refused):
        Placer(fleet, LeastLoaded(random.Random(0)), retry_after_ms=1).place(
            PlacementRequest("r", "m", [1], 1)
        )
