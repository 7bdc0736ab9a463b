"""Threads that wait for other engines: they are gone before the process ends, unless one is held up."""

from __future__ import annotations

import threading

import pytest

from services.engine.core import arrivals
from services.engine.core.arrivals import Fetchers


def named() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv fetch"]


def test_idle_threads_are_gone_after_close() -> None:
    before, pool, done = len(named()), Fetchers(2), threading.Semaphore(0)
    for _ in range(3):
        pool.run(done.release)
    for _ in range(3):
        assert done.acquire(timeout=10)
    assert len(named()) == before + 2
    pool.close()
    assert len(named()) == before


def test_close_does_not_wait_for_work_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_CLOSING_S", 0.05)
    pool, begun, go = Fetchers(1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(30)

    pool.run(work)
    assert begun.wait(10)
    pool.close()
    (thread,) = named()
    assert thread.is_alive()
    go.set()
    thread.join(10)
    assert not thread.is_alive()
