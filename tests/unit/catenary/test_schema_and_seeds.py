from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION, revision_mismatch
from catenary.seeds import derive_seed, draw_seed, uniform

int64 = st.integers(-(2**63), 2**63 - 1)


def test_a_peer_of_this_build_is_compatible() -> None:
    assert revision_mismatch(SCHEMA_REVISION, MINIMUM_PEER_REVISION, peer="engine") is None


@pytest.mark.parametrize(
    ("revision", "minimum", "word"),
    [(MINIMUM_PEER_REVISION - 1, 0, "too old"), (SCHEMA_REVISION + 4, SCHEMA_REVISION + 1, "too new")],
)
def test_a_mismatch_is_one_sentence_with_both_revisions(revision: int, minimum: int, word: str) -> None:
    text = revision_mismatch(revision, minimum, peer="engine")
    assert text is not None
    assert word in text
    assert "engine" in text
    assert str(SCHEMA_REVISION) in text
    assert str(revision) in text
    assert "\n" not in text


@given(int64, st.integers(0, 2**32))
def test_a_draw_is_in_the_unit_interval_and_repeats(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert uniform(seed, position) == value


@given(int64, st.integers(0, 10**6), st.integers(0, 10**6))
def test_samples_of_a_request_have_their_own_int64_seeds(seed: int, one: int, other: int) -> None:
    assert -(2**63) <= derive_seed(seed, one) < 2**63
    assert (derive_seed(seed, one) == derive_seed(seed, other)) is (one == other)


def test_the_numbers_are_pinned() -> None:
    """A change here changes what every recorded seed generates, and breaks a replay across versions."""
    assert uniform(0, 0) == 0.6524484863740322
    assert derive_seed(42, 1) == -437960037391119665


def test_draws_are_spread_evenly_over_positions_and_over_seeds() -> None:
    for draws in ([uniform(7, p) for p in range(20_000)], [uniform(s, 7) for s in range(20_000)]):
        buckets = [0] * 20
        for draw in draws:
            buckets[int(draw * 20)] += 1
        # Chi-square with 19 degrees of freedom: 43.8 is the 99.9th percentile.
        assert sum((count - 1000) ** 2 / 1000 for count in buckets) < 43.8


def test_neighbouring_draws_are_not_correlated() -> None:
    xs = [uniform(3, p) - 0.5 for p in range(20_000)]
    correlation = sum(a * b for a, b in itertools.pairwise(xs)) / sum(a * a for a in xs)
    assert abs(correlation) < 0.03


def test_a_drawn_seed_is_an_int64_and_fresh() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_platform_imports_without_torch_and_transformers() -> None:
    code = (
        "import sys, catenary.rpc, catenary.client, catenary.config, catenary.runtime\n"
        "sys.exit(1 if {'torch', 'transformers', 'numpy', 'services', 'gateway'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
