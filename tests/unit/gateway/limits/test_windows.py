"""What a key is told of its minute is true: what is left, when all of it is back, and when to come again."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.limits.limiter import KeyLimits, Limiter
from gateway.limits.store import Window

MINUTE_S = 60.0
# The first second of a minute.
BEGAN = 30_000_000 * MINUTE_S


def later(window: Window, seconds: float) -> Window:
    """The same, so many seconds on, if nobody uses anything."""
    previous, previous_left_s = window.previous, window.previous_left_s
    current, current_left_s = window.current, window.current_left_s
    if current_left_s - seconds <= MINUTE_S:
        previous, previous_left_s = current, current_left_s
        current, current_left_s = 0, 0.0
    return Window(
        window.amount, MINUTE_S, previous, max(0.0, previous_left_s - seconds), current, current_left_s
    )


@given(
    amount=st.integers(1, 100_000),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    left_s=st.floats(0.001, MINUTE_S),
)
def test_waits_and_resets_are_as_long_as_it_takes(
    amount: int, shares: tuple[float, float, float], left_s: float
) -> None:
    previous, current = (round(share * amount) for share in shares[:2])
    cost = max(1, round(shares[2] * amount))
    window = Window(amount, MINUTE_S, previous, left_s, current, left_s + MINUTE_S)
    wait_s, reset_s = window.wait_s(cost), window.reset_s
    assert 0 <= wait_s <= reset_s <= 2 * MINUTE_S
    assert later(window, wait_s + 1e-6).remaining >= cost
    if wait_s > 1e-6:
        assert later(window, wait_s - 1e-6).remaining < cost
    assert later(window, reset_s + 1e-6).remaining == amount


@pytest.mark.parametrize("second", [1, 30, 50, 59])
@pytest.mark.parametrize("cost", [100, 900, 1000])
async def test_who_comes_again_when_told_is_let_in(
    monkeypatch: pytest.MonkeyPatch, second: int, cost: int
) -> None:
    now = BEGAN + second
    monkeypatch.setattr(time, "time", lambda: now)
    limiter = Limiter(KeyLimits(tokens_per_minute=1000))
    await (await limiter.enter("owner", "first")).spend(1000)
    # At once, and after the minute's end, when what was used in the last one counts still.
    for then in (now, BEGAN + 62):
        now = then
        allowance = await limiter.enter("owner", "next")
        with pytest.raises(ApiError) as refused:
            await allowance.spend(cost)
        headers = dict(refused.value.extra_headers)
        reset_s = float(headers["x-ratelimit-reset-tokens"].removesuffix("s"))
        assert now + reset_s == pytest.approx(BEGAN + 2 * MINUTE_S)
        assert refused.value.retry_after_ms is not None
        after_s = refused.value.retry_after_ms / 1000
        assert 1 <= after_s <= max(1, reset_s)
    now += after_s + 1e-6
    await (await limiter.enter("owner", "again")).spend(cost)
    await limiter.close()
