"""A router or a tokenizer freezes with its connections open: the gateway notices, says so, and goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.chaos.support import MODEL, Asked, scripted_flags, serves_exactly
from tests.support.e2e_stack import ProcessStack, StackPlan, running_stack, until
from tests.support.http import Answer, call
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.token_stream import COMPLETIONS

SHORT = 150
SILENCE_S = 1.5
# Silence, the look that finds it, and a loaded machine.
NOTICED_S = 3 * SILENCE_S


@pytest.fixture(scope="module")
def frozen_processes() -> Iterator[ProcessStack]:
    """A stack whose gateway is impatient."""
    silence = ("--router-silence-s", str(SILENCE_S), "--tokenizer-silence-s", str(SILENCE_S))

    def plan(directory: Path) -> StackPlan:
        return StackPlan(
            model_dir=write_tiny_model(directory / "model"),
            model=MODEL,
            engine_flags=scripted_flags(directory),
            router_flags=("--heartbeat-s", "0.3"),
            gateway_flags=(*silence, "--connect-timeout-s", "1"),
        )

    with running_stack(plan) as stack:
        yield stack


@pytest.fixture
async def frozen(frozen_processes: ProcessStack) -> AsyncIterator[ProcessStack]:
    """The stack, serving; what a test left stopped goes on."""
    await frozen_processes.ready()
    yield frozen_processes
    for service in frozen_processes.services:
        service.send(signal.SIGCONT)


async def health_is(stack: ProcessStack, status: int, *, timeout_s: float) -> None:
    async def reached() -> bool:
        return await stack.health("/ready") == status == await stack.health("/health")

    await until(reached, f"/ready and /health {status}", timeout_s=timeout_s)


async def ask(stack: ProcessStack, prompt: object) -> Answer:
    return await call(
        stack.address, "POST", COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 4, "seed": 7}
    )


async def test_a_frozen_router(frozen: ProcessStack) -> None:
    asked = [Asked(frozen, SHORT) for _ in range(3)]
    await asyncio.gather(*(one.stream.begun() for one in asked))

    frozen.router.send(signal.SIGSTOP)
    await health_is(frozen, 503, timeout_s=NOTICED_S)
    assert await frozen.health("/live") == 200
    late = Asked(frozen, 4)
    frozen.router.send(signal.SIGCONT)
    for one in (*asked, late):
        await one.exact()
    await frozen.idle()
    await serves_exactly(frozen)


async def test_an_idle_session_is_kept(frozen: ProcessStack) -> None:
    # Only heartbeats pass: without them, this would be silence.
    deadline = time.monotonic() + 2 * SILENCE_S
    while time.monotonic() < deadline:
        assert await frozen.health("/ready") == 200
        await asyncio.sleep(0.1)


async def test_a_frozen_gateway_blames_nobody(frozen: ProcessStack) -> None:
    before = frozen.gateway.tail(1000).count("no router session")
    frozen.gateway.send(signal.SIGSTOP)
    stopped = time.monotonic()
    await until(lambda: _after(stopped + 2 * SILENCE_S), "twice the silence", timeout_s=3 * SILENCE_S)
    frozen.gateway.send(signal.SIGCONT)
    assert (await ask(frozen, "text")).status == 200
    assert await frozen.health("/ready") == 200
    assert frozen.gateway.tail(1000).count("no router session") == before


async def _after(moment: float) -> bool:
    return time.monotonic() > moment


async def test_a_frozen_tokenizer(frozen: ProcessStack) -> None:
    before = (await ask(frozen, "text")).json()["choices"][0]["text"]
    stream = Asked(frozen, 400)
    await stream.stream.begun()

    frozen.tokenizer.send(signal.SIGSTOP)
    await health_is(frozen, 503, timeout_s=NOTICED_S)
    waiting = asyncio.create_task(ask(frozen, "text"))
    # Token ids need no tokenizer.
    await serves_exactly(frozen)
    await stream.exact()

    frozen.tokenizer.send(signal.SIGCONT)
    await health_is(frozen, 200, timeout_s=NOTICED_S)
    for answer in (await waiting, await ask(frozen, "text")):
        assert answer.json()["choices"][0]["text"] == before
    await frozen.idle()
