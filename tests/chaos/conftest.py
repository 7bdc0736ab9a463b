"""A stack of processes over scripted engines, whole and idle before and after each test."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.chaos.support import MODEL, TEMPLATE, chaos_script
from tests.support.e2e_stack import ProcessStack, StackPlan
from tests.support.tiny_tokenizer import write_tiny_model


@pytest.fixture(scope="session")
def chaos_processes() -> Iterator[ProcessStack]:
    """Two scripted engines behind a router, a tokenizer and a gateway; started once."""
    directory = Path(tempfile.mkdtemp(prefix="cat-"))
    script = directory / "script.json"
    script.write_bytes(msgspec.json.encode(chaos_script()))
    stack = ProcessStack(
        directory,
        StackPlan(
            model_dir=write_tiny_model(directory / "model", chat_template=TEMPLATE),
            model=MODEL,
            engines=2,
            engine_flags=("--scripted", str(script)),
            gateway_flags=(
                *("--stalled-client-s", "1", "--state-dir", str(directory / "state")),
                *("--lease-s", "1", "--batch-lines-at-work", "4"),
            ),
        ),
    )
    stack.start()
    try:
        yield stack
    finally:
        stack.kill()
        shutil.rmtree(directory, ignore_errors=True)


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
