"""When the end of a program may end its engines: waits end with what they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from catenary.loop_thread import daemon_thread, join_daemons
from catenary_apps.llm.calls import EngineUse

# A hang is for ever.
HANGS_S = 60.0


@pytest.fixture
def use() -> EngineUse:
    return EngineUse(quiet_s=HANGS_S * 10)


@pytest.fixture
def thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Starts threads that the interpreter would wait for, and joins them."""
    threads: list[threading.Thread] = []

    def start(work: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return threads[-1]

    yield start
    for one in threads:
        one.join(HANGS_S)


def end(use: EngineUse) -> threading.Event:
    """Set once the end does not wait any more."""
    over = threading.Event()

    def work() -> None:
        use.end()
        over.set()

    threading.Thread(target=work, daemon=True).start()
    return over


def refuses(use: EngineUse) -> bool:
    try:
        with use.call():
            return False
    except RuntimeError as error:
        return "the program has ended" in str(error)


def test_an_end_without_threads_waits_for_nothing(use: EngineUse) -> None:
    use.end()
    assert refuses(use)


def test_a_thread_may_go_on_and_make_further_calls(
    use: EngineUse, thread: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    begun, go, made = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        with use.call():
            begun.set()
            assert go.wait(HANGS_S)
        made.append(not refuses(use))

    thread(work)
    assert begun.wait(HANGS_S)
    over = end(use)
    assert not over.is_set()
    go.set()
    # Long before the thread would be taken to make no call any more.
    assert over.wait(HANGS_S)
    assert made == [True]
    assert refuses(use)


def test_a_thread_that_makes_no_call_for_a_while_is_not_waited_for(
    thread: Callable[[Callable[[], object]], threading.Thread],
) -> None:
    use = EngineUse(quiet_s=0.01)
    go = threading.Event()
    living = thread(lambda: go.wait(HANGS_S))
    use.end()
    assert living.is_alive()
    assert refuses(use)
    go.set()


def test_a_daemon_that_makes_one_call_after_another_does_not_hold_the_end(use: EngineUse) -> None:
    """It stops there, and raises nothing that Python would report."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        try:
            while True:
                with use.call():
                    begun.set()
        finally:
            ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(HANGS_S)
    assert end(use).wait(HANGS_S)
    assert refuses(use)
    assert not ended.is_set()


def test_daemons_of_ours_are_waited_for() -> None:
    go = threading.Event()
    living = daemon_thread(lambda: go.wait(HANGS_S), name="test")
    assert living.daemon
    assert not join_daemons(0.0)
    go.set()
    assert join_daemons(HANGS_S)
    assert not living.is_alive()
