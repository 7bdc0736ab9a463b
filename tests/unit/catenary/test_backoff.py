"""The delays after failures."""

from __future__ import annotations

import random

from catenary.backoff import Backoff


def test_delays_double_up_to_the_maximum_with_jitter() -> None:
    backoff = Backoff(1, 5, rng=random.Random(1))
    delays = [backoff.next_delay() for _ in range(6)]
    for delay, full in zip(delays, (1, 2, 4, 5, 5, 5), strict=True):
        assert full / 2 <= delay <= full
    backoff.reset()
    assert backoff.next_delay() <= 1


def test_delays_without_jitter_are_exact_and_stay_at_the_maximum() -> None:
    backoff = Backoff(0.5, 30, jitter=0)
    delays = [backoff.next_delay() for _ in range(2000)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(delays[10:]) == {30}
