"""Requests go where their prefix is: what the real engine caches is known to the router, block by block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from catenary.rpc import open_channel
from catenary.v1 import router_pb2, router_pb2_grpc
from catenary_testing.engine import Script, ScriptedCapacity, ScriptedModel
from tests.support.e2e_stack import ProcessStack, until
from tests.support.engines import ScriptedEngine
from tests.support.http import call

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
BLOCK = 32
# No other test asks this.
STORY = "The clockmaker kept nine clocks that never agreed, and believed each of them on its own day. " * 6


async def ask(stack: ProcessStack, question: str) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY + question}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = (await call(stack.address, "POST", "/v1/chat/completions", body)).json()
    usage: dict[str, Any] = answer["usage"]
    return usage


async def receipt(stack: ProcessStack) -> router_pb2.RouteReceipt:
    """The router's last decision."""
    async with open_channel(stack.socket("router"), secret=stack.secrets.client) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        (last,) = (await stub.Explain(router_pb2.ExplainRequest(limit=1))).receipts
        return last


async def engines(stack: ProcessStack) -> dict[str, router_pb2.FleetEngine]:
    """Engines of the model by what they run on."""
    fleet = await stack.fleet()
    assert fleet is not None
    return {engine.device: engine for engine in fleet.engines if engine.model.name == MODEL}


@asynccontextmanager
async def idle_rival(stack: ProcessStack, directory: Path) -> AsyncIterator[None]:
    """One more engine of the model, which has nothing cached and nothing to do."""
    real = (await engines(stack))["cpu"]
    model = ScriptedModel(
        vocab_size=real.model.vocab_size,
        eos_token_ids=tuple(real.model.eos_token_ids),
        max_model_len=real.model.max_model_len,
        tokenizer_sha256=real.model.tokenizer_sha256,
    )
    capacity = ScriptedCapacity(block_size=BLOCK, total_blocks=4096, prefix_caching=True)
    rival = ScriptedEngine(
        [stack.socket("router")],
        stack.secrets,
        script=Script(model=model, capacity=capacity),
        served_model_name=MODEL,
        listen=(f"unix:{directory}/rival.sock",),
    )
    await rival.start()
    try:

        async def known() -> bool:
            both = await engines(stack)
            return len(both) == 2 and all(engine.index_complete for engine in both.values())

        await until(known, "two engines whose caches are known", timeout_s=30)
        yield
    finally:
        await rival.stop()
        await stack.ready()


async def test_a_prefix_is_found_where_it_was_computed(stack: ProcessStack, run_dir: Path) -> None:
    first = await ask(stack, "Which one was right?")
    real = (await engines(stack))["cpu"]
    full = (first["prompt_tokens"] - 1) // BLOCK * BLOCK

    async def indexed() -> bool:
        await ask(stack, "Which one was right?")
        last = await receipt(stack)
        return any(candidate.matched_tokens >= full for candidate in last.candidates)

    await until(indexed, "the prompt's blocks in the index", timeout_s=30)
    async with idle_rival(stack, run_dir):
        for question in ("Who wound them?", "Why nine of them, and not ten?", "Which was the oldest?"):
            usage = await ask(stack, question)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 3 * BLOCK
            last = await receipt(stack)
            assert (last.considered, last.chosen) == (2, real.instance_id)
            (best, other) = last.candidates
            # What the router believes is what the engine found.
            assert (best.instance_id, best.match_is_exact) == (real.instance_id, True)
            assert (best.matched_tokens, other.matched_tokens) == (cached, 0)
    now = (await engines(stack))["cpu"]
    assert now.index_complete
    assert now.indexed_blocks >= first["prompt_tokens"] // BLOCK
    assert now.load.cached_prompt_tokens > real.load.cached_prompt_tokens
