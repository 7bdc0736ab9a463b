from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import Arrivals, Ramp, RampShape

rates = st.floats(0.01, 1e4)
shapes = st.sampled_from(RampShape)
seeds = st.integers(-(2**63), 2**63)


@given(rates, st.floats(0.05, 50), seeds, st.integers(1, 200))
def test_a_seed_has_one_schedule_and_it_is_in_order(
    rate: float, burstiness: float, seed: int, count: int
) -> None:
    arrivals = Arrivals(rate, burstiness)
    schedule = arrivals.schedule(count, seed)
    assert schedule == arrivals.schedule(count, seed)
    assert len(schedule) == count
    assert all(0 <= before <= after for before, after in pairwise(schedule))
    assert schedule[: count // 2] == arrivals.schedule(count // 2, seed), "more of them change nothing"


@given(rates, seeds, st.integers(1, 100), st.floats(0.01, 100))
def test_a_duration_leaves_out_what_is_due_later(
    rate: float, seed: int, count: int, duration_s: float
) -> None:
    whole = Arrivals(rate).schedule(count, seed)
    cut = Arrivals(rate).schedule(count, seed, duration_s)
    assert cut == [due for due in whole if due < duration_s]


@given(shapes, rates, rates, st.integers(1, 1000))
def test_a_ramp_is_the_inverse_of_the_integral_of_its_rate(
    shape: RampShape, first: float, last: float, count: int
) -> None:
    ramp = Ramp(shape, first, last)
    seconds = ramp.seconds(count)
    assert ramp.due(count, seconds) == pytest.approx(seconds, rel=1e-6)
    moments = [ramp.due(expected, seconds) for expected in range(2 * count)]
    assert all(before < after for before, after in pairwise(moments))
    # One arrival takes a time between those at the two rates.
    lowest, highest = 1 / max(first, last), 1 / min(first, last)
    for before, after in pairwise(moments):
        assert lowest * (1 - 1e-6) <= after - before + 1e-9 * seconds
        assert after - before - 1e-9 * seconds <= highest * (1 + 1e-6)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(burstiness: float) -> None:
    schedule = Arrivals(10, burstiness).schedule(20_000, 1)
    gaps = [after - before for before, after in pairwise([0.0, *schedule])]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_seeds_differ() -> None:
    assert Arrivals(1).schedule(3, 1) != Arrivals(1).schedule(3, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(0),
        lambda: Arrivals(math.nan),
        lambda: Arrivals(1, 0),
        lambda: Arrivals(1, math.inf),
        lambda: Ramp(RampShape.LINEAR, 0, 1),
        lambda: Arrivals(1, ramp=Ramp(RampShape.LINEAR, 1, 2)),
        lambda: Arrivals().schedule(1, 0),
    ],
)
def test_what_is_no_rate_is_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]
