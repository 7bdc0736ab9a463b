"""Clients that go away in the middle: at once the engine computes for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from catenary.v1 import router_pb2
from tests.support.e2e_stack import ProcessStack, until
from tests.support.http import call

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
CLIENTS = 8
# A minute's work at least: far more than is generated before the client goes, or soon after.
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
GONE_S = 15.0


def connect(stack: ProcessStack, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, **options)


async def ask(client: AsyncOpenAI, number: int, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": f"Count from {number} on."}]
    return await client.chat.completions.create(model=MODEL, messages=messages, **ENDLESS, **options)


async def running(stack: ProcessStack, count: int) -> None:
    async def reported() -> bool:
        fleet = await stack.fleet() or router_pb2.GetFleetResponse()
        return sum(engine.load.running for engine in fleet.engines) == count

    await until(reported, f"{count} running sequences", timeout_s=30)


async def test_streams_that_are_closed(stack: ProcessStack) -> None:
    async with connect(stack) as client:
        streams = [await ask(client, number, stream=True) for number in range(CLIENTS)]
        await running(stack, CLIENTS)
        for stream in streams:
            await stream.close()
    await stack.idle(timeout_s=GONE_S)


async def test_calls_that_are_cancelled(stack: ProcessStack) -> None:
    async with connect(stack) as client:
        calls = [asyncio.create_task(ask(client, number)) for number in range(CLIENTS)]
        await running(stack, CLIENTS)
        for waiting in calls:
            waiting.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await stack.idle(timeout_s=GONE_S)


async def test_calls_that_run_out_of_patience(stack: ProcessStack) -> None:
    async with connect(stack, timeout=2) as client:
        with pytest.raises(openai.APITimeoutError):
            await ask(client, 1)
    await stack.idle(timeout_s=GONE_S)


@pytest.mark.advisory("CVE-2026-9540")
async def test_gauges_after_an_abort(stack: ProcessStack) -> None:
    async with connect(stack) as client:
        stream = await ask(client, 1, stream=True)
        await running(stack, 1)
        await stream.close()
    await stack.idle(timeout_s=GONE_S)

    async def zero() -> bool:
        page = (await call(stack.address, "GET", "/metrics")).body.decode()
        values = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith(("vllm:num_requests", "vllm:kv_cache_usage"))
        }
        assert {"vllm:num_requests_running", "vllm:num_requests_waiting"} <= values.keys()
        return not any(values.values())

    await until(zero, "gauges that say idle", timeout_s=GONE_S)
