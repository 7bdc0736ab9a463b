"""How long a peer was silent, and whether it was the peer."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.link.router_session import Silence
from gateway.text.target import TokenizerTarget
from tests.support.session_streams import GreetedStream, Listening, session_on
from tests.support.virtual_time import stand_still, virtual_time

LIMIT_S = 0.2


@virtual_time
async def test_silence_ends_the_wait_and_a_word_begins_it_anew() -> None:
    loop = asyncio.get_running_loop()
    silence = Silence(LIMIT_S)
    waiting = asyncio.create_task(silence.wait())
    for _ in range(8):
        await asyncio.sleep(LIMIT_S / 4)
        silence.heard()
    assert not waiting.done()
    last = loop.time()
    await asyncio.wait_for(waiting, 5)
    assert loop.time() - last == pytest.approx(LIMIT_S)


@virtual_time
async def test_a_process_that_stood_still_listens_first() -> None:
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(Silence(LIMIT_S).wait())
    await asyncio.sleep(0)
    stand_still(3 * LIMIT_S)
    woken = loop.time()
    await asyncio.wait_for(waiting, 5)
    assert loop.time() - woken == pytest.approx(LIMIT_S)


async def listened_s(heartbeat_ms: int) -> float | None:
    """How long a session bears a mute router that promised this; None: as long as the test lasts."""
    loop = asyncio.get_running_loop()
    listener = Listening()
    session = session_on(GreetedStream(heartbeat_ms), listener, LIMIT_S)
    running = asyncio.create_task(session.run())
    await listener.connected.wait()
    started = loop.time()
    try:
        await asyncio.wait_for(listener.lost.wait(), 5 * LIMIT_S)
    except TimeoutError:
        return None
    finally:
        running.cancel()
    return loop.time() - started


async def test_only_promised_heartbeats_are_missed_and_three_of_them() -> None:
    assert await listened_s(0) is None
    assert (await listened_s(10) or 0) >= LIMIT_S
    assert (await listened_s(100) or 0) >= 0.3
    assert await listened_s(60_000) is None


@pytest.mark.parametrize(("silence_s", "misses"), [(10.0, 5), (1.0, 5), (60.0, 30)])
async def test_a_target_may_leave_some_questions_unanswered(silence_s: float, misses: int) -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        changes: list[bool] = []
        target: Any = TokenizerTarget(
            "unix:/nowhere",
            channel,
            silence_s=silence_s,
            max_message_mib=1,
            on_change=lambda: changes.append(target.prompt),
        )
        assert not target.answering
        target.heard()
        for _ in range(misses):
            assert target.answering
            target.missed()
            assert not target.prompt
        assert not target.answering
        target.heard()
        assert (target.answering, target.prompt) == (True, True)
        # Each change is told, and that nothing has changed is not.
        target.heard()
        assert changes == [True, *[False] * misses, True]
