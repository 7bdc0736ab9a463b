"""Least loaded placement, and the reasons for no placement."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.fleet import Engine, Fleet
from services.router.placement import POLICIES, LeastLoaded, PlacementRequest, Placer, policy_named

REQUEST = PlacementRequest("r", "m", range(8), 8)


def fleet_of(*slots: int, blocks: int = 64) -> tuple[Fleet, list[Engine]]:
    fleet = Fleet(lease_s=5)
    engines = []
    for number, max_running in enumerate(slots):
        hello = engine_pb2.EngineHello(
            instance_id=f"i{number}",
            model=common_pb2.ModelInfo(name="m", max_model_len=100),
            capacity=engine_pb2.Capacity(block_size=16, total_blocks=blocks, max_running=max_running),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )
        engines.append(fleet.attach(hello, now=0, unix_time=0)[0])
    return fleet, engines


def placer(fleet: Fleet) -> Placer:
    return Placer(fleet, LeastLoaded(random.Random(1)), retry_after_ms=50)


def test_policies_are_found_by_name():
    assert isinstance(policy_named("least_loaded", random.Random()), LeastLoaded)
    assert "least_loaded" in POLICIES
    with pytest.raises(KeyError):
        policy_named("none", random.Random())


def test_ties_are_drawn_at_random():
    _, engines = fleet_of(4, 4, 4)
    policy = LeastLoaded(random.Random(1))
    picked = Counter(policy.pick(REQUEST, engines).engine.instance_id for _ in range(300))
    assert min(picked.values()) > 60


def test_load_placed_since_the_report_counts_at_once():
    fleet, engines = fleet_of(100, 100)
    for _ in range(50):
        engine = placer(fleet).place(REQUEST).engine
        engine.placed_sequences += 1
        engine.placed_tokens += 8
    assert engines[0].placed_sequences == engines[1].placed_sequences == 25


def test_others_load_counts_by_the_report():
    fleet, (busy, idle) = fleet_of(10, 10)
    busy.apply(engine_pb2.LoadReport(sequence=1, state=engine_pb2.ENGINE_STATE_SERVING, running=3))
    for _ in range(3):
        assert placer(fleet).place(REQUEST).engine is idle
        idle.placed_sequences += 1
    idle.placed_sequences += 1
    assert placer(fleet).place(REQUEST).engine is busy


def test_unequal_engines_fill_up_alike():
    fleet, (small, large) = fleet_of(10, 30)
    for _ in range(20):
        placer(fleet).place(REQUEST).engine.placed_sequences += 1
    assert small.placed_sequences == 5
    assert large.placed_sequences == 15


def test_a_long_prompt_weighs_more_than_a_short_one():
    fleet, (first, second) = fleet_of(100, 100)
    first.placed_sequences, first.placed_tokens = 1, 900
    second.placed_sequences, second.placed_tokens = 3, 24
    assert placer(fleet).place(REQUEST).engine is second


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda fleet, engines: [fleet.detach(e) for e in engines], common_pb2.ERROR_CODE_UNAVAILABLE),
        (
            lambda fleet, engines: [setattr(e, "placed_sequences", 2) for e in engines],
            common_pb2.ERROR_CODE_OVERLOADED,
        ),
    ],
)
def test_no_placement_is_retryable_and_says_when(prepare, code):
    fleet, engines = fleet_of(2, 2)
    prepare(fleet, engines)
    with pytest.raises(Refused) as caught:
        placer(fleet).place(REQUEST)
    assert caught.value.error.code == code
    assert caught.value.error.retryable
    assert caught.value.error.retry_after_ms == 50


def test_an_unknown_model_is_not_found():
    fleet, engines = fleet_of(2)
    with pytest.raises(Refused) as caught:
        placer(fleet).place(PlacementRequest("r", "other", [1], 1))
    assert caught.value.error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
    assert not caught.value.error.retryable
    with pytest.raises(Refused) as caught:
        placer(fleet).place(REQUEST, excluding=engines)
    assert caught.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
