"""Fixtures of the tests that run a gateway over a scripted engine."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from catenary_testing.engine import Script
from tests.support.cluster import Cluster, running_cluster
from tests.support.gateway import Stack, running_stack, shared_tokenizer
from tests.support.tiny_tokenizer import TOOLS_TEMPLATE
from tests.support.waiting import QUIET_THREAD, loop_beside_tests

StartStack = Callable[..., Awaitable[Stack]]
StartCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture(scope="session")
def tokenizer_target() -> Iterator[str]:
    """One tokenizer process for all tests that need one."""
    with shared_tokenizer() as target:
        yield target


@pytest.fixture
async def start_stack(run_dir: Path, tokenizer_target: str) -> AsyncIterator[StartStack]:
    """Starts a gateway over a router and a scripted engine; the test must leave it idle."""
    stacks: list[Stack] = []
    async with AsyncExitStack() as running:

        async def start(script: Script | None = None, **options: Any) -> Stack:
            stack = await running.enter_async_context(
                running_stack(run_dir, tokenizer_target, script, **options)
            )
            stacks.append(stack)
            return stack

        yield start
        for stack in stacks:
            await stack.idle()


@pytest.fixture
async def start_cluster(run_dir: Path, parsing_tokenizer: str) -> AsyncIterator[StartCluster]:
    """Starts a gateway over several routers and engines, with a tokenizer that names parsers; the test must
    leave it idle."""
    clusters: list[Cluster] = []
    async with AsyncExitStack() as running:

        async def start(script: Script | None = None, **options: Any) -> Cluster:
            made = running_cluster(run_dir, parsing_tokenizer, script, **options)
            clusters.append(await running.enter_async_context(made))
            return clusters[-1]

        yield start
        for cluster in clusters:
            await cluster.idle()


@pytest.fixture(scope="session")
def parsing_tokenizer() -> Iterator[str]:
    """One tokenizer process that shows tools and names parsers: hermes for calls, qwen3 for reasoning."""
    flags = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
    with shared_tokenizer(*flags, chat_template=TOOLS_TEMPLATE) as target:
        yield target


@pytest.fixture
async def start_parsing(run_dir: Path, parsing_tokenizer: str) -> AsyncIterator[StartStack]:
    """As `start_stack`, with that tokenizer."""
    async with AsyncExitStack() as running:
        stacks: list[Stack] = []

        async def start(script: Script | None = None, **options: Any) -> Stack:
            made = running_stack(run_dir, parsing_tokenizer, script, **options)
            stacks.append(await running.enter_async_context(made))
            return stacks[-1]

        yield start
        for stack in stacks:
            await stack.idle()


@pytest.fixture(scope="session")
def stack_in_a_thread(tokenizer_target: str) -> Iterator[Stack]:
    """A gateway over a scripted engine without rules, in a thread with a loop of its own."""
    loop, started, over = loop_beside_tests(), Future[Stack](), asyncio.Event()

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="cat-") as directory:
            try:
                async with running_stack(Path(directory), tokenizer_target) as made:
                    started.set_result(made)
                    await over.wait()
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name=QUIET_THREAD, daemon=True)
    thread.start()
    yield started.result(60)
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
    loop.close()


@pytest.fixture
async def shared_stack(stack_in_a_thread: Stack) -> AsyncIterator[Stack]:
    """That one, for tests that only send requests and ask whether it is idle; they must leave it idle."""
    yield stack_in_a_thread
    await stack_in_a_thread.idle()


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """A gateway over a scripted engine without rules."""
    return await start_stack()
