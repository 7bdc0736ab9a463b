"""EngineService.Profile over gRPC and `catenary profile`, on scripted engines."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path

import grpc
import pytest

from catenary.rpc import error_of, open_channel
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from catenary_apps.profile.run import run_profile
from catenary_testing.engine import Script
from tests.support.specs import sequence_spec
from tests.support.waiting import eventually

SLOW = Script(step_delay_ms=5)


async def _profile(engine, secret, **request) -> tuple[dict, engine_pb2.ProfileEnd]:
    trace, end = bytearray(), None
    async with open_channel(engine.app.address, secret=secret) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        async for response in stub.Profile(engine_pb2.ProfileRequest(**request)):
            assert end is None
            trace += response.trace
            end = response.end if response.HasField("end") else None
    assert end is not None
    return json.loads(trace), end


async def _refusal(engine, secret, **request) -> common_pb2.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _profile(engine, secret, **request)
    return error_of(caught.value)


async def _work(fake_router, *, tokens: int = 4000) -> None:
    router = await fake_router.attached()
    await router.submit(1, sequence_spec([11, 12, 13], max_tokens=tokens))
    await eventually(lambda: router.tokens.get(1), "the first token")


async def test_a_busy_engine_tells_its_steps(fake_router, secrets, start_engine):
    engine = await start_engine(script=SLOW)
    await _work(fake_router)
    trace, end = await _profile(engine, secrets.client, steps=8, max_ms=60_000)
    assert (end.steps, end.dropped_events) == (8, 0)
    steps = [event["args"]["step"] for event in trace["traceEvents"] if event["name"] == "wait"]
    assert len(steps) == 8
    assert steps == list(range(steps[0], steps[0] + 8))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    again, _ = await _profile(engine, secrets.client, steps=1, max_ms=60_000)
    assert min(e["ts"] for e in again["traceEvents"] if e["ph"] == "X") > trace["traceEvents"][-1]["ts"]


async def test_an_idle_engine_ends_with_the_time_and_no_steps(secrets, start_engine):
    engine = await start_engine()
    await eventually(lambda: engine.app.frontend.ready, "the core")
    trace, end = await _profile(engine, secrets.client, steps=5, max_ms=50)
    assert end.steps == 0
    assert trace["otherData"]["steps"] == 0


async def test_an_idle_engine_waits_for_steps(fake_router, secrets, start_engine):
    engine = await start_engine(script=SLOW)
    await eventually(lambda: engine.app.frontend.ready, "the core")
    waiting = asyncio.create_task(_profile(engine, secrets.client, steps=3, max_ms=60_000))
    await eventually(lambda: engine.app.frontend.profiles.busy, "the profile")
    await _work(fake_router)
    _, end = await waiting
    assert end.steps == 3


async def test_one_at_a_time_and_a_caller_that_goes_away_makes_room(secrets, start_engine):
    engine = await start_engine()
    await eventually(lambda: engine.app.frontend.ready, "the core")
    first = asyncio.create_task(_profile(engine, secrets.client, steps=5, max_ms=3_600_000))
    await eventually(lambda: engine.app.frontend.profiles.busy, "the profile")
    error = await _refusal(engine, secrets.client, steps=5, max_ms=50)
    assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_OVERLOADED, True)
    first.cancel()
    await eventually(lambda: not engine.app.frontend.profiles.busy, "the end of the profile")
    _, end = await _profile(engine, secrets.client, steps=5, max_ms=50)
    assert end.steps == 0


async def test_a_core_that_dies_ends_the_profile(secrets, start_engine):
    engine = await start_engine()
    await eventually(lambda: engine.app.frontend.ready, "the core")
    profile = asyncio.create_task(_refusal(engine, secrets.client, steps=5, max_ms=60_000))
    await eventually(lambda: engine.app.frontend.profiles.busy, "the profile")
    engine.faults.crash()
    assert (await profile).code == common_pb2.ERROR_CODE_ENGINE_LOST


async def test_a_core_that_starts_is_unavailable(secrets, start_engine):
    engine = await start_engine(script=Script(start_delay_ms=60_000))
    error = await _refusal(engine, secrets.client, steps=5, max_ms=50)
    assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert "not running" in error.message


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"steps": 0, "max_ms": 1}, "steps"),
        ({"steps": 10_001, "max_ms": 1}, "steps"),
        ({"steps": 201, "max_ms": 1, "device_activities": True}, "steps"),
        ({"steps": 1, "max_ms": 0}, "max_ms"),
        ({"steps": 1, "max_ms": 3_600_001}, "max_ms"),
    ],
)
async def test_numbers_out_of_bounds_are_refused(secrets, start_engine, request_, param):
    engine = await start_engine()
    error = await _refusal(engine, secrets.client, **request_)
    assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, param)


async def test_an_engine_s_secret_is_not_enough(secrets, start_engine):
    engine = await start_engine()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _profile(engine, secrets.engine, steps=1, max_ms=50)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_command_writes_a_trace_and_sums_it_up(
    fake_router, secrets, start_engine, tmp_path: Path, capsys, monkeypatch
):
    engine = await start_engine(script=SLOW)
    await _work(fake_router)
    monkeypatch.setenv("CATENARY_CLIENT_SECRET", secrets.client)
    output = tmp_path / "trace.json.gz"
    flags = ["--engine", engine.app.address, "--steps", "4", "--output", str(output)]
    assert await asyncio.to_thread(run_profile, flags) == 0
    out = capsys.readouterr().out
    assert "4 steps in" in out
    assert str(output) in out
    assert "steps with compilations: none" in out
    trace = json.loads(gzip.decompress(output.read_bytes()))
    assert len([event for event in trace["traceEvents"] if event["name"] == "wait"]) == 4
    assert await asyncio.to_thread(run_profile, [*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    assert os.listdir(tmp_path) == ["trace.json.gz"]


async def test_the_command_says_in_one_line_what_is_wrong(secrets, start_engine, tmp_path: Path, capsys):
    engine = await start_engine()
    flags = ["--engine", engine.app.address, "--output", str(tmp_path / "t.json")]
    assert await asyncio.to_thread(run_profile, flags) == 1
    assert capsys.readouterr().err.endswith("The service refused the caller's secret.\n")
    nobody = ["--engine", f"unix:{tmp_path}/none.sock", "--output", str(tmp_path / "t.json")]
    assert await asyncio.to_thread(run_profile, nobody) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
