"""Attaching, leases, aborts and the loss of a router."""

from __future__ import annotations

import pytest

from catenary.rpc import AddressInUse
from catenary.schema import SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from catenary_testing.engine import Faults, Script, ScriptedCapacity, ScriptedCore, ScriptedFaults
from services.engine.app import EngineApp
from services.engine.config import EngineConfig
from tests.support.engines import FAST
from tests.support.fake_router import FakeRouter
from tests.support.secrets import TestSecrets
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
SLOW = Script(step_delay_ms=10)


async def test_the_hello_tells_who_the_engine_is(fake_router, start_engine):
    engine = await start_engine(engine_name="left-rack", served_model_name="tiny")
    hello = (await fake_router.attached()).hello
    assert hello.instance_id == engine.instance_id
    assert hello.engine_name == "left-rack"
    assert hello.device == "scripted"
    assert hello.state == engine_pb2.ENGINE_STATE_SERVING
    assert (hello.model.name, hello.model.max_model_len, hello.model.vocab_size) == ("tiny", 4096, 32000)
    assert list(hello.model.eos_token_ids) == [2]
    assert (hello.capacity.block_size, hello.capacity.total_blocks) == (16, 1024)


async def test_loads_are_reported_per_interval_with_rising_numbers(fake_router, start_engine):
    await start_engine()
    router = await fake_router.attached()
    await eventually(lambda: len(router.loads) >= 5, "five reports")
    assert [load.sequence for load in router.loads] == list(range(1, len(router.loads) + 1))
    assert router.load.state == engine_pb2.ENGINE_STATE_SERVING
    assert router.load.total_blocks == 1024


async def test_an_older_schema_is_refused_and_tried_again(fake_router, start_engine):
    await start_engine(script=Script(faults=ScriptedFaults(schema_revision=0)))
    await eventually(lambda: fake_router.attempts >= 2, "a second attempt")
    assert not fake_router.attachments


async def test_a_router_with_an_older_schema_is_left(fake_router, start_engine):
    fake_router.schema_revision = 0
    engine = await start_engine()
    await eventually(lambda: fake_router.attempts >= 2, "a second attempt")
    assert len(engine.app.frontend.routers) == 0
    fake_router.schema_revision = SCHEMA_REVISION
    await eventually(lambda: len(engine.app.frontend.routers) == 1, "an attachment")


@pytest.mark.parametrize("secret", ["wrong", "secret-of-client-secret"])
async def test_an_engine_without_the_secret_does_not_attach(fake_router, start_engine, run_dir, secret):
    file = run_dir / "other-secret"
    file.write_text(secret)
    options = {"client_secret_file": None, "engine_secret_file": file}
    engine = await start_engine(**options)
    await eventually(lambda: engine.app.frontend.ready is not None, "the core")
    with pytest.raises(AssertionError, match="not within"):
        await eventually(lambda: fake_router.attempts, "an attempt that passes the gate", timeout_s=0.5)
    assert len(engine.app.frontend.routers) == 0


async def test_an_abort_ends_the_sequence_and_frees_its_blocks(fake_router, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=1000))
    await router.submit(2, sequence_spec(PROMPT, max_tokens=20))
    await eventually(lambda: router.tokens.get(1), "a first token")
    await router.abort(1)
    end = await router.end_of(1)
    assert end.reason == common_pb2.FINISH_REASON_ABORT
    assert end.usage.completion_tokens == len(router.tokens[1])
    await router.end_of(2)
    assert router.tokens[2] == expected_tokens(PROMPT, 20)
    await engine.idle()
    assert router.aborts == [(1, common_pb2.ABORT_OUTCOME_ABORTED)]


async def test_aborts_are_idempotent_and_tell_what_they_found(fake_router, start_engine):
    await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=2))
    await router.end_of(1)
    await router.submit(2, sequence_spec(PROMPT, max_tokens=500))
    for handle in (1, 2, 2, 99):
        await router.abort(handle)
    await router.end_of(2)
    await router.abort(2)
    await eventually(lambda: len(router.aborts) == 5, "five answers")
    assert router.aborts[0] == (1, common_pb2.ABORT_OUTCOME_ALREADY_FINISHED)
    assert router.aborts[1] == (2, common_pb2.ABORT_OUTCOME_ABORTED)
    assert router.aborts[3] == (99, common_pb2.ABORT_OUTCOME_UNKNOWN)
    assert router.aborts[4] == (2, common_pb2.ABORT_OUTCOME_ALREADY_FINISHED)


async def test_a_waiting_sequence_is_aborted_too(fake_router, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    engine.faults.stall()
    await router.submit(1, sequence_spec(PROMPT))
    await eventually(lambda: engine.app.frontend.live_sequences == 1, "the sequence")
    await router.abort(1)
    engine.faults.resume()
    end = await router.end_of(1)
    assert end.reason == common_pb2.FINISH_REASON_ABORT
    assert not router.tokens[1]
    await engine.idle()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_handle_is_used_once(fake_router, start_engine, ended):
    await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=30))
    if ended:
        await router.end_of(1)
    await router.submit(1, sequence_spec(PROMPT, max_tokens=3))
    error = await router.refusal_of(1)
    assert error.code == common_pb2.ERROR_CODE_DUPLICATE_REQUEST
    await router.end_of(1)
    assert router.tokens[1] == expected_tokens(PROMPT, 30)


async def test_a_silent_router_loses_its_sequences_and_the_engine_attaches_anew(fake_router, start_engine):
    fake_router.lease_ms = 300
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: router.tokens.get(1), "a first token")
    fake_router.renews = False
    await eventually(lambda: router.closed, "the end of the stream")
    await engine.idle()
    assert 1 not in router.ends
    fake_router.renews = True
    again = await fake_router.attached(2)
    assert again.epoch > router.epoch
    assert again.hello.instance_id == router.hello.instance_id
    # Handles begin anew with the stream.
    await again.submit(1, sequence_spec(PROMPT, max_tokens=5))
    await again.end_of(1)
    assert again.tokens[1] == expected_tokens(PROMPT, 5)


async def test_the_orphan_timeout_caps_a_long_lease(fake_router, start_engine):
    engine = await start_engine(script=SLOW, orphan_timeout_s=0.3)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: router.tokens.get(1), "a first token")
    fake_router.renews = False
    await eventually(lambda: router.closed, "the end of the stream")
    await engine.idle()


async def test_a_dropped_stream_aborts_its_sequences(fake_router, start_engine):
    engine = await start_engine(script=SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: router.tokens.get(1), "a first token")
    engine.drop_streams()
    await fake_router.attached(2)
    assert router.closed
    await engine.idle()


async def test_a_router_that_comes_back_is_found_again(
    fake_router, secrets: TestSecrets, start_engine, run_dir
):
    engine = await start_engine()
    await fake_router.attached()
    await fake_router.stop()
    await eventually(lambda: len(engine.app.frontend.routers) == 0, "the loss")
    second = FakeRouter.at(secrets, run_dir)
    await second.start()
    router = await second.attached()
    await router.submit(1, sequence_spec(PROMPT))
    await router.end_of(1)
    await second.stop()


async def test_several_routers_share_an_engine(fake_router, secrets: TestSecrets, start_engine, run_dir):
    other = FakeRouter(secrets, f"unix:{run_dir}/other.sock")
    await other.start()
    engine = await start_engine([fake_router.address, other.address], script=SLOW)
    first, second = await fake_router.attached(), await other.attached()
    await first.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await second.submit(1, sequence_spec(PROMPT, max_tokens=30, seed=8))
    await eventually(lambda: first.tokens.get(1), "a first token")
    await fake_router.stop()
    await second.end_of(1)
    assert second.tokens[1] == expected_tokens(PROMPT, 30, seed=8)
    await engine.idle()
    await other.stop()


async def test_a_core_with_other_facts_makes_the_engine_attach_anew(fake_router, secrets, run_dir):
    scripts = [Script(), Script(capacity=ScriptedCapacity(total_blocks=64))]
    faults = Faults()
    config = EngineConfig(
        router=(fake_router.address,),
        listen=(f"unix:{run_dir}/e.sock",),
        **{**FAST, **secrets.options},
    )
    app = EngineApp(config, core_factory=lambda restart: ScriptedCore(scripts[int(restart)], faults))
    await app.start()
    try:
        first = await fake_router.attached()
        faults.crash()
        second = await fake_router.attached(2)
        await eventually(lambda: first.closed, "the end of the first stream")
        assert (first.hello.capacity.total_blocks, second.hello.capacity.total_blocks) == (1024, 64)
        assert second.hello.instance_id == first.hello.instance_id
    finally:
        await app.stop(0)


async def test_a_slow_router_gets_merged_steps_and_loses_nothing(fake_router, start_engine):
    engine = await start_engine(script=Script(capacity=ScriptedCapacity(total_blocks=8192)))
    router = await fake_router.attached()
    fake_router.reading.clear()
    for handle in range(16):
        await router.submit(handle, sequence_spec([handle + 4], max_tokens=3000))
    # The engine is not slowed by a router that does not read.
    await eventually(
        lambda: engine.app.frontend.load().generated_tokens == 48_000, "all tokens", timeout_s=30
    )
    assert not router.ends
    fake_router.reading.set()
    for handle in range(16):
        await router.end_of(handle)
        assert router.tokens[handle] == expected_tokens([handle + 4], 3000)
    await engine.idle()
    # gRPC's own windows hold the first steps; the rest was merged here.
    assert max(count for step in router.steps for count in step.token_counts) > 1


async def test_an_address_in_use_is_said(fake_router, start_engine):
    with pytest.raises(AddressInUse):
        await start_engine(listen=(fake_router.address,))
