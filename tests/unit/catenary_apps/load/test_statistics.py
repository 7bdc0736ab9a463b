from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import parse_objectives
from catenary_apps.load.plan import is_good
from catenary_apps.load.statistics import describe, peak_overlap

samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
percents = st.integers(0, 1000).map(lambda tenths: tenths / 10)


@given(samples, percents)
def test_numbers_are_those_of_numpy(values: list[float], percent: float) -> None:
    found = describe(values, [percent])
    assert found.percentiles[percent] == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)
    assert found.median == pytest.approx(np.median(values), rel=1e-9, abs=1e-9)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-6)
    assert (found.minimum, found.maximum, found.count) == (min(values), max(values), len(values))


@given(samples, st.integers(0, 60), percents)
def test_a_failure_is_slower_than_every_answer(values: list[float], failed: int, percent: float) -> None:
    found = describe(values, [percent], failed=failed).percentiles[percent]
    with np.errstate(invalid="ignore"):
        expected = np.percentile([*values, *[np.inf] * failed], percent, method="higher")
    if found is None:
        assert expected == np.inf
    else:
        assert found <= expected
        assert found >= np.percentile(values, percent) - 1e-6, "failures make nothing look better"


def test_of_nothing_nothing_is_known() -> None:
    for failed in (0, 3):
        found = describe([], [50, 99], failed=failed)
        assert (found.count, found.failed, found.mean, found.median) == (0, failed, None, None)
        assert found.percentiles == {50.0: None, 99.0: None}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=30))
def test_the_peak_is_the_most_spans_over_one_moment(pairs: list[tuple[int, int]]) -> None:
    spans = [(float(start), float(start + length)) for start, length in pairs]
    counts = [sum(start <= moment < end for start, end in spans) for moment in range(101)]
    assert peak_overlap(spans) == max(counts)


def test_objectives_are_read_as_they_are_written_elsewhere() -> None:
    assert parse_objectives(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    assert parse_objectives(["ttft:200 e2el:1000"]) == {"ttft": 200, "e2e": 1000}
    assert parse_objectives([]) == {}


@pytest.mark.parametrize(
    "word", ["ttft", "itl:1", "ttft:0", "ttft:-1", "ttft:x", "ttft:nan", "ttft:inf", ":1"]
)
def test_what_is_no_objective_is_refused(word: str) -> None:
    with pytest.raises(ValueError):
        parse_objectives([word])
    with pytest.raises(ValueError, match="two limits"):
        parse_objectives(["ttft:1", "ttft:2"])


def test_good_is_what_keeps_every_limit() -> None:
    measured = {"ttft": 100.0, "tpot": None, "e2e": 500.0}
    assert is_good(measured, {"ttft": 100, "tpot": 1, "e2e": 500})
    assert not is_good(measured, {"ttft": 99, "e2e": 500})
    assert not is_good(measured, {"e2e": 499})
    assert is_good(measured, {})
