"""The gateway that runs a batch is killed: nothing of the batch is lost, and nothing is there twice."""

from __future__ import annotations

import asyncio

import openai

from tests.chaos.support import MODEL, body, expected_text, slow_prompt
from tests.support.batches import ended, results, started
from tests.support.e2e_stack import ProcessStack
from tests.support.http import call
from tests.support.token_stream import COMPLETIONS

LINES = 24
TOKENS = 12


async def test_a_gateway_killed_twice_in_a_batch(stack: ProcessStack) -> None:
    prompts = [slow_prompt() for _ in range(LINES)]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": COMPLETIONS, "body": body(prompt, TOKENS)}
        for index, prompt in enumerate(prompts)
    ]
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        batch = await started(client, lines)
        background = await client.responses.create(model=MODEL, input="~", background=True)
        for share in (0.2, 0.6):
            while batch.request_counts is None or batch.request_counts.completed < share * LINES:
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            assert batch.status == "in_progress"
            stack.gateway.kill()
            stack.gateway.start()
            await stack.ready()
            after = await client.batches.retrieve(batch.id)
            assert after.request_counts is not None
            assert after.request_counts.completed >= batch.request_counts.completed
            batch = after

        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            *(LINES, LINES, 0),
        )
        good = await results(client, batch.output_file_id)
        texts = {name: item["response"]["body"]["choices"][0]["text"] for name, item in good.items()}
        assert texts == {str(index): expected_text(prompt, TOKENS) for index, prompt in enumerate(prompts)}
        assert batch.error_file_id is None
        files = [file.id async for file in client.files.list()]
        assert sorted(files) == sorted([batch.input_file_id, str(batch.output_file_id)])
        # What nobody works on any more says so.
        while background.status in ("queued", "in_progress"):
            await asyncio.sleep(0.2)
            background = await client.responses.retrieve(background.id)
        assert background.status == "failed"
    assert (await call(stack.address, "GET", "/health")).status == 200
