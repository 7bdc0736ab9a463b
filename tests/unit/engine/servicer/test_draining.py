"""Orders to drain: the earliest deadline counts, whoever gave it."""

from __future__ import annotations

import asyncio

import pytest

from services.engine.servicer import DrainOrder


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_without_an_order_the_engines_own_time_is_left():
    clock = Clock()
    order = DrainOrder(30.0, clock=clock)
    clock.now += 100
    assert order.left_s == 30.0
    order.give(None)
    clock.now += 10
    assert order.left_s == 20.0


def test_the_earliest_deadline_counts():
    clock = Clock()
    order = DrainOrder(30.0, clock=clock)
    order.give(60.0)
    order.give(90.0)
    assert order.left_s == 60.0
    order.give(5.0)
    assert order.left_s == 5.0
    clock.now += 6
    assert order.left_s == 0.0


async def test_it_is_over_when_a_nearer_deadline_says_so():
    order = DrainOrder(30.0)
    waiting = asyncio.create_task(order.given())
    await asyncio.sleep(0)
    assert not waiting.done()
    order.give(60.0)
    await waiting
    over = asyncio.create_task(order.over())
    await asyncio.sleep(0)
    assert not over.done()
    order.give(0.0)
    async with asyncio.timeout(1):
        await over


@pytest.mark.parametrize("deadline_s", [0.0, 0.01])
async def test_a_deadline_that_passes_ends_the_wait(deadline_s):
    order = DrainOrder(30.0)
    order.give(deadline_s)
    async with asyncio.timeout(5):
        await order.over()
