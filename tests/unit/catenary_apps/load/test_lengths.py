from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import parse_lengths
from catenary_apps.load.conversations import MAX_LENGTH

whole = st.integers(1, MAX_LENGTH)
specs = st.one_of(
    whole.map(str),
    st.tuples(whole, whole).map(lambda pair: f"uniform:{min(pair)}:{max(pair)}"),
    st.tuples(whole, st.floats(0, 0.99)).map(lambda pair: f"ratio:{pair[0]}:{pair[1]}"),
    st.tuples(
        st.sampled_from(["normal", "lognormal"]), st.floats(1, MAX_LENGTH), st.floats(0, MAX_LENGTH)
    ).map(lambda parts: ":".join(map(str, parts))),
)


@given(specs, st.integers())
def test_every_length_is_a_whole_number_within_the_bounds(spec: str, seed: int) -> None:
    lengths = parse_lengths(spec)
    generator = random.Random(seed)
    drawn = [lengths.draw(generator) for _ in range(20)]
    assert all(isinstance(one, int) and 1 <= one <= MAX_LENGTH for one in drawn)
    generator = random.Random(seed)
    assert drawn == [lengths.draw(generator) for _ in range(20)]


@given(whole, whole)
def test_fixed_and_uniform_keep_to_what_they_say(one: int, other: int) -> None:
    low, high = sorted((one, other))
    generator = random.Random(0)
    assert parse_lengths(str(low)).draw(generator) == low
    assert low <= parse_lengths(f"uniform:{low}:{high}").draw(generator) <= high


def test_a_ratio_is_around_its_middle() -> None:
    generator = random.Random(0)
    drawn = [parse_lengths("ratio:100:0.5").draw(generator) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (50, 150)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_lengths(kind: str) -> None:
    generator = random.Random(0)
    drawn = [parse_lengths(f"{kind}:500:100").draw(generator) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(500, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "x", "0", "-1", "1.5", "nan", "inf", "1e99", f"{MAX_LENGTH + 1}"),
        *("uniform:1", "uniform:2:1", "uniform:0:5", "uniform:1:1.5", f"uniform:1:{MAX_LENGTH + 1}"),
        *("ratio:10:1", "ratio:10:-0.1", "ratio:10:nan", "normal:10:-1", "normal:10:nan", "lognormal:0:1"),
        *("zipf:1:2", "normal:1:2:3", ":", "::"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line(spec: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_lengths(spec)
    assert "\n" not in str(refused.value)
