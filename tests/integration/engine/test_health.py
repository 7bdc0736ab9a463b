"""Core crashes, stalls, drains and what the status service says."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import open_channel
from catenary.runtime import StartRefused
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from catenary_testing.engine import Match, Rule, Script, ScriptedFaults, Then
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
SLOW = Script(step_delay_ms=10)


async def _status(engine, secret) -> engine_pb2.GetStatusResponse:
    async with open_channel(engine.app.address, secret=secret) as channel:
        return await engine_pb2_grpc.EngineServiceStub(channel).GetStatus(engine_pb2.GetStatusRequest())


async def _serving(engine) -> bool:
    async with open_channel(engine.app.address, secret=None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="catenary.v1.EngineService"))
        return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_crashed_core_ends_its_sequences_and_is_started_again(fake_router, secrets, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    for handle in (1, 2):
        await router.submit(handle, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: len(router.tokens) == 2, "first tokens")
    engine.faults.crash()
    for handle in (1, 2):
        end = await router.end_of(handle)
        assert end.reason == common_pb2.FINISH_REASON_ERROR
        assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert end.error.retryable
        assert end.usage.completion_tokens == len(router.tokens[handle])
    await eventually(lambda: engine.app.frontend.core_restarts == 1, "the restart")
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_SERVING, "SERVING")
    assert engine_pb2.ENGINE_STATE_NOT_SERVING in {load.state for load in router.loads}
    await router.submit(3, sequence_spec(PROMPT, max_tokens=5))
    await router.end_of(3)
    assert router.tokens[3] == expected_tokens(PROMPT, 5)
    # The attachment outlived the core.
    assert len(fake_router.attachments) == 1
    status = await _status(engine, secrets.client)
    assert (status.core_restarts, status.trouble) == (1, "")
    assert router.load.generated_tokens >= sum(map(len, router.tokens.values()))


async def test_heartbeats_go_on_and_submits_are_refused_while_the_core_is_dead(
    fake_router, secrets, start_engine
):
    faults = ScriptedFaults(fail_restarts=3)
    engine = await start_engine(script=Script(faults=faults), core_restart_backoff_max_s=0.4)
    router = await fake_router.attached()
    engine.faults.crash()
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_NOT_SERVING, "NOT_SERVING")
    before = len(router.loads)
    await router.submit(1, sequence_spec(PROMPT))
    error = await router.refusal_of(1)
    assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert error.retryable
    assert (await _status(engine, secrets.client)).trouble.startswith("the engine's core died: ")
    await eventually(lambda: engine.app.frontend.core_restarts == 4, "four starts")
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_SERVING, "SERVING")
    assert len(router.loads) > before
    assert not router.closed


async def test_a_crash_by_rule_and_by_token_count(fake_router, start_engine):
    rule = Rule(prompt=(5,), tokens=(40, 41), then=Then.CRASH)
    engine = await start_engine(script=Script(rules=(rule,), faults=ScriptedFaults(crash_after_tokens=6)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec([5]))
    assert (await router.end_of(1)).error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    assert router.tokens[1] == [40, 41]
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_SERVING, "SERVING")
    await eventually(lambda: engine.app.frontend.core_restarts == 1, "the restart")
    await router.submit(2, sequence_spec(PROMPT, max_tokens=50))
    assert (await router.end_of(2)).error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    assert router.tokens[2] == expected_tokens(PROMPT, 6)


@pytest.mark.advisory("GHSA-4xqp-c3mv-qff7")
async def test_an_engine_with_work_and_no_step_is_not_serving(fake_router, secrets, start_engine):
    engine = await start_engine(script=SLOW, stall_limit_s=0.2)
    router = await fake_router.attached()
    await eventually(lambda: router.loads, "a report")
    assert await _serving(engine)
    await router.submit(1, sequence_spec(PROMPT, max_tokens=40))
    await eventually(lambda: router.tokens.get(1), "a first token")
    engine.faults.stall()
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_STALLED, "STALLED")
    assert not await _serving(engine)
    assert (await _status(engine, secrets.client)).state == engine_pb2.ENGINE_STATE_STALLED
    await router.submit(2, sequence_spec(PROMPT))
    assert (await router.refusal_of(2)).code == common_pb2.ERROR_CODE_UNAVAILABLE
    engine.faults.resume()
    await router.end_of(1)
    assert router.tokens[1] == expected_tokens(PROMPT, 40)
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_SERVING, "SERVING")
    assert await _serving(engine)


async def test_an_idle_engine_does_not_stall(fake_router, start_engine):
    engine = await start_engine(stall_limit_s=0.1)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT))
    await router.end_of(1)
    seen = len(router.loads)
    await eventually(lambda: len(router.loads) > seen + 5, "more reports")
    assert {load.state for load in router.loads} == {engine_pb2.ENGINE_STATE_SERVING}
    assert engine.app.frontend.load().running == 0


async def test_a_drain_finishes_what_runs_and_takes_nothing_new(fake_router, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=40))
    await eventually(lambda: router.tokens.get(1), "a first token")
    stopping = asyncio.create_task(engine.stop(drain_s=10))
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_DRAINING, "DRAINING")
    await router.submit(2, sequence_spec(PROMPT))
    error = await router.refusal_of(2)
    assert error.code == common_pb2.ERROR_CODE_DRAINING
    assert error.retryable
    end = await router.end_of(1)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert router.tokens[1] == expected_tokens(PROMPT, 40)
    await stopping
    await eventually(lambda: router.closed, "the end of the stream")
    assert len(fake_router.attachments) == 1


async def test_a_drain_that_takes_too_long_ends_the_rest_with_a_retryable_error(fake_router, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: router.tokens.get(1), "a first token")
    await engine.stop(drain_s=0.1)
    end = await router.end_of(1)
    assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    assert end.error.retryable


async def test_the_status_shows_a_start_in_progress(fake_router, secrets, start_engine):
    engine = await start_engine(script=Script(start_delay_ms=2000))
    seen = []
    while not seen or seen[-1].state == engine_pb2.ENGINE_STATE_STARTING:
        seen.append(await _status(engine, secrets.client))
    assert seen[0].state == engine_pb2.ENGINE_STATE_STARTING
    assert any(status.activity == "pretending to load weights" for status in seen)
    progress = [status.progress for status in seen if status.HasField("progress")]
    assert progress == sorted(progress)
    assert progress[-1] > 0.5
    assert seen[-1].state == engine_pb2.ENGINE_STATE_SERVING
    assert not seen[-1].activity
    assert seen[-1].model.name == "scripted"
    await fake_router.attached()


@pytest.mark.parametrize(
    ("role", "code"),
    [(None, grpc.StatusCode.UNAUTHENTICATED), ("engine", grpc.StatusCode.PERMISSION_DENIED)],
)
async def test_the_status_needs_a_clients_secret(secrets, start_engine, role, code):
    engine = await start_engine()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _status(engine, None if role is None else secrets.engine)
    assert caught.value.code() == code


async def test_a_first_start_that_fails_ends_the_engine(start_engine, monkeypatch):
    from catenary_testing.engine import ScriptedCore
    from services.engine.servicer import CoreStartError

    async def fail(self, on_progress):
        raise CoreStartError("no such model")

    monkeypatch.setattr(ScriptedCore, "start", fail)
    engine = await start_engine()
    with pytest.raises(ExceptionGroup) as caught:
        await engine.app.finished()
    refusal = caught.value.exceptions[0]
    assert isinstance(refusal, StartRefused)
    assert "no such model" in str(refusal)


async def test_scripted_refusals_and_dropped_streams(fake_router, start_engine):
    script = Script(faults=ScriptedFaults(refuse_first=1, drop_stream_after_tokens=3), step_delay_ms=5)
    engine = await start_engine(script=script)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT))
    assert (await router.refusal_of(1)).code == common_pb2.ERROR_CODE_OVERLOADED
    engine.faults.refuse_next(common_pb2.Error(code=common_pb2.ERROR_CODE_TIMEOUT, message="told so"))
    await router.submit(2, sequence_spec(PROMPT))
    assert (await router.refusal_of(2)).code == common_pb2.ERROR_CODE_TIMEOUT
    await router.submit(3, sequence_spec(PROMPT, max_tokens=400))
    await eventually(lambda: router.closed, "the drop")
    again = await fake_router.attached(2)
    await engine.idle()
    rule_free = sequence_spec(PROMPT, max_tokens=10)
    await again.submit(1, rule_free)
    await again.end_of(1)
    assert again.tokens[1] == expected_tokens(PROMPT, 10)


async def test_a_rule_can_stall_the_engine(fake_router, start_engine):
    rule = Rule(match=Match.PREFIX, prompt=(5,), tokens=(40,), then=Then.STALL)
    engine = await start_engine(script=Script(rules=(rule,)), stall_limit_s=0.1)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec([5, 6]))
    await eventually(lambda: router.load.state == engine_pb2.ENGINE_STATE_STALLED, "STALLED")
    assert router.tokens[1] == [40]
    await router.abort(1)
    assert engine.app.frontend.live_sequences == 1
