"""Lines of batches count against the limits of their key: they wait for them, and fail by none."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.support.batches import ended, line, results, started
from tests.support.gateway import COMPLETIONS, MODEL, Stack, script
from tests.support.http import call
from tests.support.minutes import stop_the_clock
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

ALICE, BOB = "sk-alice", "sk-bob"


def client_of(stack: Stack, key: str = ALICE) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key=key, max_retries=0)


async def ask(stack: Stack, key: str) -> int:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    return (await call(stack.address, "POST", COMPLETIONS, body, {"Authorization": f"Bearer {key}"})).status


async def completed(client: openai.AsyncOpenAI, batch_id: str) -> int:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    assert counts is not None
    assert counts.failed == 0
    return counts.completed


async def test_a_batch_waits_for_the_next_minute(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place at work, which nobody holds who waits: another key's batch goes on."""
    stop_the_clock(monkeypatch)
    stack = await start_stack(api_key=(ALICE, BOB), key_requests_per_minute=3, batch_lines_at_work=1)
    lines = [line(f"n{index}", {"prompt": "x", "max_tokens": 2}) for index in range(5)]
    async with client_of(stack) as client, client_of(stack, BOB) as other:
        batch = await started(client, lines)
        done = 0
        async with asyncio.timeout(20):
            while done < 3:
                await asyncio.sleep(0.02)
                done = await completed(client, batch.id)
        assert await ask(stack, ALICE) == 429
        assert (await ended(other, await started(other, lines[:3]))).status == "completed"
        assert await completed(client, batch.id) == 3
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        errors = await results(client, batch.error_file_id)
    assert [item["error"]["code"] for item in errors.values()] == ["batch_cancelled"] * 2


async def test_lines_at_work_and_one_that_no_minute_allows(start_stack: StartStack) -> None:
    stack = await start_stack(
        script(step_delay_ms=10), api_key=(ALICE, BOB), key_concurrent=1, key_tokens_per_minute=500
    )
    lines = [line(f"n{index}", {"prompt": "x", "max_tokens": 8}) for index in range(4)]
    lines.append(line("long", {"prompt": "x" * 600, "max_tokens": 2}))
    most = 0
    async with client_of(stack) as client:
        job = asyncio.create_task(ended(client, await started(client, lines), 40))
        while not job.done():
            most = max(most, stack.engine.app.frontend.load().running)
            await asyncio.sleep(0.002)
        batch = await job
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 4)
        (error,) = (await results(client, batch.error_file_id)).values()
    assert error["response"]["status_code"] == 429
    assert error["response"]["body"]["error"]["code"] == "exceeds_key_limit"
    assert most == 1
    await eventually(lambda: stack.engine.app.frontend.live_sequences == 0, "an idle engine")
    assert await ask(stack, ALICE) == 200
