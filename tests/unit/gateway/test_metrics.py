"""Counters of tokens show what the client library's own would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.metrics import TokenCounter, TokenHistogram

BOUNDS = (0.001, 0.01, 0.5)
gaps = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from(BOUNDS) | st.floats(0, 2, width=16),
    st.integers(1, 4),
)


@given(seen=st.lists(gaps, max_size=8))
def test_a_page_of_either_is_the_same(seen: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = TokenCounter("tokens", "Tokens.", ours)
    histogram = TokenHistogram("seconds", "Seconds.", BOUNDS, ours)
    reference = Counter("tokens", "Tokens.", ("model_name",), registry=theirs)
    times = Histogram("seconds", "Seconds.", ("model_name",), buckets=BOUNDS, registry=theirs)
    for model, seconds, count in seen:
        counter.of(model).value += count
        histogram.of(model).add(seconds, count)
        reference.labels(model).inc(count)
        for _ in range(count):
            times.labels(model).observe(seconds)
    assert samples(ours) == pytest.approx(samples(theirs))


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """What a page says, but for the moments at which counters were made."""
    page = generate_latest(registry).decode().splitlines()
    found = [line.rsplit(" ", 1) for line in page if "_created" not in line and not line.startswith("#")]
    return {name: float(value) for name, value in found}
