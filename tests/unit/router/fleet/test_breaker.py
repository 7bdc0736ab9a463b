"""The breaker: opens after faults, lets probes through, and is remembered by the engine's name."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import Breaker, BreakerOptions, BreakerState, Engine, Fleet
from services.router.fleet.breaker import MAX_REMEMBERED, Breakers

OPTIONS = BreakerOptions(faults=3, window_s=100, open_s=5, open_max_s=12)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    assert [breaker.failed(now) for _ in range(3)] == [False, False, True]
    return breaker


def attach(fleet: Fleet, instance: str, name: str, *, now: float = 0.0, **fields) -> Engine:
    hello = engine_pb2.EngineHello(
        instance_id=instance,
        engine_name=name,
        model=common_pb2.ModelInfo(name="m", max_model_len=100, vocab_size=10),
        capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=4, max_waiting=2),
        state=engine_pb2.ENGINE_STATE_SERVING,
        **fields,
    )
    return fleet.attach(hello, now=now, unix_time=now)[0]


def test_it_opens_after_faults_and_closes_after_a_probe():
    breaker = opened()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.tick(4.9)
    assert breaker.tick(5.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.failed(6.0) for _ in range(3)] == [False, False, True]
    assert breaker.tick(11.0)


def test_each_failed_probe_doubles_the_wait_up_to_the_longest():
    breaker = opened()
    now = 0.0
    for wait in (5, 10, 12, 12):
        assert not breaker.tick(now + wait - 0.1)
        now += wait
        assert breaker.tick(now)
        assert breaker.failed(now)


def test_a_probe_that_runs_long_enough_is_believed():
    breaker = opened()
    breaker.tick(5.0)
    assert not breaker.stepped(20.0)
    assert not breaker.stepped(24.9)
    assert breaker.stepped(25.0)
    assert breaker.state is BreakerState.CLOSED


def test_what_ended_well_takes_a_fault_off_and_time_forgets_them():
    breaker = Breaker(OPTIONS)
    for _ in range(10):
        assert not breaker.failed(0.0)
        assert not breaker.succeeded()
    assert not breaker.remembers(0.0)
    breaker.failed(0.0)
    breaker.failed(1.0)
    assert not breaker.failed(100.5)
    assert breaker.remembers(150.0)
    assert not breaker.remembers(201.0)


def test_good_ends_of_older_sequences_do_not_close_it():
    breaker = opened()
    assert not breaker.succeeded()
    assert breaker.state is BreakerState.OPEN


@given(st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "stepped", "tick"]), st.floats(0, 50))))
def test_it_is_never_open_for_longer_than_the_longest_wait(events):
    breaker = Breaker(OPTIONS)
    now, since = 0.0, 0.0
    for event, passed in events:
        now += passed
        was = breaker.state
        changed = breaker.succeeded() if event == "succeeded" else getattr(breaker, event)(now)
        assert changed == (was is not breaker.state) or (was is BreakerState.HALF_OPEN and event == "failed")
        if changed and breaker.state is BreakerState.OPEN:
            since = now
        if breaker.state is BreakerState.OPEN and event == "tick":
            assert now - since < OPTIONS.open_max_s


def test_candidates_leave_out_the_open_and_give_the_half_open_one():
    fleet = Fleet(lease_s=5, breaker=OPTIONS)
    bad, good = attach(fleet, "i1", "bad"), attach(fleet, "i2", "good")
    for _ in range(3):
        bad.breaker.failed(0.0)
    bad.touch()
    assert fleet.candidates("m") == [good]
    assert fleet.served_models()[0].serving_engines == 2
    bad.breaker.tick(5.0)
    bad.touch()
    assert fleet.candidates("m") == [bad, good]
    bad.placed_sequences = 1
    assert fleet.candidates("m") == [good]
    bad.breaker.succeeded()
    bad.touch()
    assert fleet.candidates("m") == [bad, good]


def test_an_engine_that_crashes_and_comes_back_finds_its_breaker():
    fleet = Fleet(lease_s=5, breaker=OPTIONS)
    for life in range(3):
        engine = attach(fleet, f"life-{life}", "e", now=float(life))
        assert engine.available
        engine.breaker.failed(float(life))
        engine.heard(float(life))
        assert fleet.detach(engine)
    assert not attach(fleet, "life-3", "e", now=3.0).available
    # Another engine of the name has a record of its own.
    assert attach(fleet, "twin", "e", now=3.0).available


def test_one_that_replaces_itself_keeps_its_breaker():
    fleet = Fleet(lease_s=5, breaker=OPTIONS)
    first = attach(fleet, "same", "e")
    assert attach(fleet, "same", "e", now=1.0).breaker is first.breaker


def test_remembered_breakers_are_bounded():
    breakers = Breakers(OPTIONS)
    rng = random.Random(0)
    given = {}
    for number in range(3 * MAX_REMEMBERED):
        breaker = Breaker(OPTIONS)
        breaker.failed(0.0)
        given[breaker] = f"e{number if rng.random() < 0.5 else 0}"
        breakers.give_back(given[breaker], breaker, 0.0)
    kept = [name for name in given.values() if breakers.take(name, 0.0) in given]
    assert 0 < len(kept) <= MAX_REMEMBERED
    fresh = Breaker(OPTIONS)
    breakers.give_back("new", fresh, 0.0)
    assert breakers.take("new", 0.0) is not fresh


def test_roles_decide_what_an_engine_is_asked_for():
    fleet = Fleet(lease_s=5)
    both = attach(fleet, "i1", "both")
    prefill = attach(fleet, "i2", "prefill", role=engine_pb2.ENGINE_ROLE_PREFILL)
    decode = attach(fleet, "i3", "decode", role=engine_pb2.ENGINE_ROLE_DECODE, publishes_kv=True)
    assert both.role == engine_pb2.ENGINE_ROLE_BOTH
    assert decode.publishes_kv
    assert fleet.candidates("m") == [both, decode]
    assert fleet.candidates("m", role=engine_pb2.ENGINE_ROLE_PREFILL) == [prefill]
    assert fleet.candidates("m", role=engine_pb2.ENGINE_ROLE_DECODE) == [decode]
    assert fleet.candidates("m", role=engine_pb2.ENGINE_ROLE_UNSPECIFIED) == [both, prefill, decode]
    assert fleet.served_models()[0].serving_engines == 2


def test_a_fault_that_was_none_is_taken_back():
    breaker = opened()
    assert breaker.acquitted(0.0)
    assert breaker.state is BreakerState.CLOSED
    # Two faults are left.
    assert breaker.failed(1.0)
    assert breaker.tick(6.0)
    assert breaker.acquitted(1.0)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.acquitted(0.0)


def test_a_fault_that_does_not_count_takes_no_other_one_back():
    breaker = opened()
    # One of an open breaker.
    assert not breaker.failed(1.0)
    assert not breaker.acquitted(1.0)
    assert breaker.state is BreakerState.OPEN
    # One that a good end has taken off.
    breaker = Breaker(OPTIONS)
    breaker.failed(0.0)
    breaker.succeeded()
    assert [breaker.failed(now) for now in (1.0, 2.0, 3.0)] == [False, False, True]
    assert not breaker.acquitted(0.0)
    assert breaker.state is BreakerState.OPEN


def test_a_probe_that_failed_by_itself_may_be_followed_by_another():
    breaker = opened()
    assert breaker.tick(150.0)
    assert breaker.failed(150.0)
    assert not breaker.acquitted(150.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.tick(150.0)
    assert breaker.state is BreakerState.HALF_OPEN
