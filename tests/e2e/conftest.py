"""One whole stack with the real model in float32 for all tests that need it, and the reference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.engine.model import prepare_model
from tests.support.e2e_stack import FurtherModel, ProcessStack, StackPlan, running_stack

if TYPE_CHECKING:
    from tests.support.reference import Reference

MODEL = "SmolLM2-135M-Instruct"
EMBEDDER = "all-MiniLM-L6-v2"
START_S = 120.0


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The small model, converted once into the cache."""
    return prepare_model("smollm2")


@pytest.fixture(scope="session")
def reference(model_directory: Path) -> Reference:
    """transformers, float32."""
    from tests.support.reference import Reference

    return Reference(model_directory)


@pytest.fixture(scope="session")
def real_processes(model_directory: Path) -> Iterator[ProcessStack]:
    """Router, gateway, and a tokenizer and an engine for each of two models, as processes; started once."""
    engine = ("--model", str(model_directory), "--dtype", "float32", "--kv-cache-gib", "0.75")
    encoder = prepare_model("minilm")
    embedding = FurtherModel(encoder, EMBEDDER, ("--model", str(encoder), "--dtype", "float32"))
    plan = StackPlan(
        model_dir=model_directory,
        model=MODEL,
        engine_flags=(*engine, "--max-model-len", "2048"),
        further=(embedding,),
    )
    with running_stack(lambda _: plan) as stack:
        yield stack
        stack.stop()


@pytest.fixture
async def stack(real_processes: ProcessStack) -> AsyncIterator[ProcessStack]:
    """The stack, serving; when the test is over, nothing is left in it."""
    await real_processes.ready(timeout_s=START_S)
    yield real_processes
    await real_processes.idle()
