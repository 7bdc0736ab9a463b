"""A stack of processes over scripted engines, whole and idle before and after each test."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.chaos.support import MODEL, TEMPLATE, scripted_flags
from tests.support.e2e_stack import ProcessStack, StackPlan, running_stack
from tests.support.tiny_tokenizer import write_tiny_model


@pytest.fixture(scope="session")
def chaos_processes() -> Iterator[ProcessStack]:
    """Two scripted engines behind a router, a tokenizer and a gateway; started once."""

    def plan(directory: Path) -> StackPlan:
        return StackPlan(
            model_dir=write_tiny_model(directory / "model", chat_template=TEMPLATE),
            model=MODEL,
            engines=2,
            engine_flags=scripted_flags(directory),
            gateway_flags=(
                *("--stalled-client-s", "1", "--state-dir", str(directory / "state")),
                *("--lease-s", "1", "--batch-lines-at-work", "4"),
            ),
        )

    with running_stack(plan) as stack:
        yield stack


@pytest.fixture
async def stack(chaos_processes: ProcessStack) -> AsyncIterator[ProcessStack]:
    """Everything runs and serves; after the test it must do so again, and be idle."""
    stack = chaos_processes
    await restore(stack)
    yield stack
    await restore(stack)
    await stack.idle()


async def restore(stack: ProcessStack) -> None:
    """Wake and start whatever a test left stopped or dead, and wait until all serve."""
    stack.start()
    for service in stack.services:
        service.send(signal.SIGCONT)
    await stack.ready()
