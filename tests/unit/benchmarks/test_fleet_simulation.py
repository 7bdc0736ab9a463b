"""The simulated fleet: the same seed gives the same run, and no request is lost whatever dies."""

from __future__ import annotations

import random

import pytest

from benchmarks.fleet import TRAFFIC, FleetPlan, FleetRun
from services.router.placement import POLICIES

REQUESTS = 36


def run(traffic: str, seed: int = 1, **plan: object) -> FleetRun:
    arrivals = TRAFFIC[traffic](random.Random(seed), REQUESTS, 30.0)
    return FleetRun(FleetPlan(engines=3, seed=seed, **plan), arrivals).run()  # type: ignore[arg-type]


def table(run: FleetRun) -> list[tuple[float | None, ...]]:
    return [(one.arrived, one.first_token, one.ended, one.tokens) for one in run.outcomes]


def test_a_seed_is_a_run() -> None:
    first, second, other = run("multi-turn"), run("multi-turn"), run("multi-turn", seed=2)
    assert table(first) == table(second)
    assert table(first) != table(other)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("traffic", sorted(TRAFFIC))
def test_every_request_ends_once(policy: str, traffic: str) -> None:
    made = run(traffic, policy=policy, blocks=256, faults=(0.4, 0.8))
    assert len(made.outcomes) == REQUESTS
    for one in made.outcomes:
        assert one.first_token is not None
        assert one.ended is not None
        assert one.arrived < one.first_token <= one.ended
        assert one.tokens >= 16
    assert made.idle
    assert sum(one.placements for one in made.outcomes) > REQUESTS


def test_a_fleet_whose_engines_are_all_dead_goes_on() -> None:
    made = run("multi-turn", faults=(0.4, 0.4, 0.4, 0.4), slow_share=1.0)
    assert [engine.slowness for engine in made.engines.values()] == [3.0] * 3
    assert made.idle


def test_prefixes_are_found_where_they_are() -> None:
    cost, least = run("multi-turn"), run("multi-turn", policy="least_loaded")
    assert cost.cached_tokens / cost.prompt_tokens > 1.2 * least.cached_tokens / least.prompt_tokens
