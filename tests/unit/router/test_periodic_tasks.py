"""PeriodicTasks: each for itself, and none judges peers after a time in which the router stood still."""

from __future__ import annotations

import asyncio

import pytest

from services.router.app import PeriodicTask, PeriodicTasks
from tests.support.virtual_time import stand_still, virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def until_more(calls: list[float], count: int) -> None:
    async with asyncio.timeout(5):
        while len(calls) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@virtual_time
async def test_a_task_that_fails_stops_neither_itself_nor_another():
    failed, done = [], []

    def fail() -> None:
        failed.append(now())
        raise ValueError("every time")

    tasks = PeriodicTasks()
    tasks.start(PeriodicTask("fails", 0.005, fail), PeriodicTask("works", 0.005, lambda: done.append(now())))
    await until_more(done, 3)
    await until_more(failed, 3)
    await tasks.stop()
    count = len(done)
    await asyncio.sleep(0.02)
    assert len(done) == count


@virtual_time
async def test_peers_are_not_judged_right_after_a_standstill():
    judged, sent = [], []
    tasks = PeriodicTasks()
    tasks.start(
        PeriodicTask("judges", 0.05, lambda: judged.append(now()), judges=True),
        PeriodicTask("sends", 0.05, lambda: sent.append(now())),
    )
    # Let both fall asleep, then stand still for long.
    await asyncio.sleep(0.01)
    stand_still(0.3)
    over = now()
    await until_more(judged, 1)
    await tasks.stop()
    assert (sent[0] - over, judged[0] - over) == pytest.approx((0, 0.05))
