"""How long a peer was silent, and whether it was the peer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from gateway.link.silence import Silence
from gateway.text.target import TokenizerTarget

LIMIT_S = 0.2


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
    assert loop.time() - last >= LIMIT_S


async def test_a_process_that_stood_still_listens_first() -> None:
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(Silence(LIMIT_S).wait())
    await asyncio.sleep(0)
    time.sleep(3 * LIMIT_S)  # noqa: ASYNC251 - the loop is what stands still here
    woken = loop.time()
    await asyncio.wait_for(waiting, 5)
    assert loop.time() - woken >= LIMIT_S / 2


@pytest.mark.parametrize(("silence_s", "misses"), [(10.0, 5), (1.0, 5), (60.0, 30)])
async def test_a_target_may_leave_some_questions_unanswered(silence_s: float, misses: int) -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        target: Any = TokenizerTarget("unix:/nowhere", channel, silence_s=silence_s)
        assert not target.answering
        target.heard()
        for _ in range(misses):
            assert target.answering
            target._missed()
            assert not target.prompt
        assert not target.answering
        target.heard()
        assert (target.answering, target.prompt) == (True, True)
