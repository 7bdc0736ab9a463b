"""The core as a process behind the servicer: spawned, watched, restarted, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest

from catenary.v1 import common_pb2, engine_pb2
from services.engine.app import EngineApp
from services.engine.config import EngineConfig
from services.engine.domain import SamplingOptions
from services.engine.link import CoreFailed, CoreStep, SubmitSequence
from services.engine.servicer import CoreStartError, ProcessCore, spawn_process
from tests.support.engines import FAST
from tests.support.repository import ROOT
from tests.support.specs import sequence_spec
from tests.support.waiting import eventually

STUB = ROOT / "tests/support/stub_core.py"


def _core(mode: str, stop_s: float = 5.0) -> ProcessCore:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ProcessCore(b"{}", stop_s=stop_s, spawn=spawn_process(env, (sys.executable, str(STUB), mode)))


def _submit(key: int) -> SubmitSequence:
    return SubmitSequence(key, [5, 6], 2, SamplingOptions(temperature=0.0), 1, 0, [], False)


async def test_a_core_process_starts_steps_and_stops():
    core, said = _core("answer"), []
    ready = await core.start(said.append)
    assert ready.model.vocab_size == 1000
    assert [progress.activity for progress in said] == ["pretending"]
    core.submit(_submit(1))
    event = await anext(aiter(core.events()))
    assert isinstance(event, CoreStep)
    assert event.columns.token_ids == [1]
    await core.stop()
    await core.stop()


async def test_a_core_that_refuses_to_start_gives_its_reason():
    core = _core("refuse")
    with pytest.raises(CoreStartError, match="told to refuse"):
        await core.start(lambda _: None)
    await core.stop()


async def test_a_core_that_exits_is_reported_with_its_status():
    core = _core("exit")
    await core.start(lambda _: None)
    core.submit(_submit(3))
    assert [event async for event in core.events()] == [CoreFailed("the core process ended with status 9")]
    await core.stop()


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}")]
)
async def test_a_core_that_is_killed_is_reported_with_its_signal(number: int, name: str):
    core = _core("answer")
    await core.start(lambda _: None)
    process: Any = core.process
    os.kill(process.pid, number)
    events = [event async for event in core.events()]
    assert events == [CoreFailed(f"the core process was killed by {name}")]
    await core.stop()


async def test_a_core_that_ignores_everything_is_killed():
    core = _core("hang", stop_s=0.2)
    await core.start(lambda _: None)
    core.submit(_submit(1))
    core.submit(_submit(3))
    await anext(aiter(core.events()))
    await core.stop()


async def test_a_core_that_still_loads_is_ended_at_once():
    core = _core("load", stop_s=30.0)
    starting = asyncio.create_task(core.start(lambda _: None))
    await eventually(lambda: core.process is not None, "the process")
    started = time.monotonic()
    starting.cancel()
    await core.stop()
    assert time.monotonic() - started < 5


async def test_a_killed_core_is_restarted_and_its_sequences_end(fake_router, secrets, run_dir):
    cores: list[ProcessCore] = []

    def factory(restart: bool) -> ProcessCore:
        cores.append(_core("hang", stop_s=0.2))
        return cores[-1]

    config = EngineConfig(
        router=(fake_router.address,),
        listen=(f"unix:{run_dir}/e.sock",),
        served_model_name="scripted",
        **{**FAST, **secrets.options},
    )
    app = EngineApp(config, core_factory=factory)
    await app.start()
    try:
        router = await fake_router.attached()
        await router.submit(1, sequence_spec([5, 6], max_tokens=1))
        await router.submit(2, sequence_spec([5, 6], max_tokens=1))
        await router.end_of(2)
        assert router.tokens == {1: [1], 2: [2]}
        await router.submit(3, sequence_spec([5, 6], max_tokens=1))
        await eventually(lambda: app.frontend.live_sequences == 1, "the third sequence")
        process = cores[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        end = await router.end_of(3)
        assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert end.error.retryable
        await eventually(lambda: app.frontend.core_restarts == 1, "the restart")
        await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_SERVING, "SERVING")
        assert len(cores) == 2
        assert router.load.steps == 2
    finally:
        await app.stop(0)
