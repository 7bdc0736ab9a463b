"""Generate: one sequence for a plain gRPC client."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from catenary.rpc import error_of, open_channel
from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.router_fakes import (
    CLIENT_SECRET,
    ENGINE_SECRET,
    FakeEngine,
    expected,
    running_router,
    spec,
    until,
)


def generate(channel, sequence):
    return router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.GenerateRequest(spec=sequence))


async def collect(call):
    """All token ids, and the end."""
    tokens, end = [], None
    async for answer in call:
        assert end is None
        tokens.extend(answer.token_ids)
        end = answer.end if answer.HasField("end") else None
    return tokens, end


async def test_a_plain_client_gets_the_scripted_tokens(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address) as engine,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        results = await asyncio.gather(*[collect(generate(channel, spec([n, 3]))) for n in range(32)])
        for n, (tokens, end) in enumerate(results):
            assert tokens == expected([n, 3])
            assert end.reason == common_pb2.FINISH_REASON_LENGTH
            assert end.usage.completion_tokens == 16
        assert router.admission.live_sequences == 0
        models = await router_pb2_grpc.RouterServiceStub(channel).ListModels(router_pb2.ListModelsRequest())
        assert models.models[0].info == engine.model_info
        assert models.models[0].serving_engines == 1
        assert models.models[0].created > 1_700_000_000
        fleet = await router_pb2_grpc.RouterServiceStub(channel).GetFleet(router_pb2.GetFleetRequest())
        assert fleet.router_instance_id == router.instance_id
        assert fleet.engines[0].instance_id == engine.instance_id
        seen = fleet.engines[0]
        assert fleet.live_sequences == seen.placed_sequences == seen.placed_tokens == 0


async def test_a_seed_and_an_id_are_given_to_who_has_none(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        FakeEngine(address) as engine,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        bare = common_pb2.SequenceSpec(
            model="scripted", token_ids=[1, 2], stopping=common_pb2.StoppingParams(max_tokens=4)
        )
        await asyncio.gather(collect(generate(channel, bare)), collect(generate(channel, bare)))
        first, second = (submit.spec for submit in engine.submitted)
        assert first.request_id
        assert first.request_id != second.request_id
        assert first.sampling.HasField("seed")
        assert first.sampling.seed != second.sampling.seed
        assert first.traceparent


async def test_a_refusal_is_the_status_with_the_error_in_the_trailer(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address) as engine,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        for sequence, status, code in (
            (spec([1], model="nope"), grpc.StatusCode.NOT_FOUND, common_pb2.ERROR_CODE_MODEL_NOT_FOUND),
            (spec([]), grpc.StatusCode.INVALID_ARGUMENT, common_pb2.ERROR_CODE_INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(generate(channel, sequence))
            assert caught.value.code() == status
            assert error_of(caught.value).code == code
        engine.refuse_with = common_pb2.Error(
            code=common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, message="too long", param="prompt"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(generate(channel, spec([1])))
        assert error_of(caught.value) == engine.refuse_with
        assert router.admission.live_sequences == 0


async def test_cancelling_the_call_aborts_in_the_engine(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        queued = generate(channel, spec([1]))
        await until(lambda: engine.live)
        queued.cancel()
        await until(lambda: len(engine.aborted) == 1)
        decoding = generate(channel, spec([2]))
        await until(lambda: engine.live)
        await engine.step(3)
        assert list((await decoding.read()).token_ids) == expected([2])[:3]
        decoding.cancel()
        await until(lambda: len(engine.aborted) == 2)
        await until(lambda: router.admission.live_sequences == 0)


async def test_an_engine_that_nobody_replaces_is_a_retryable_error(
    monkeypatch,
):
    async with (
        running_router(monkeypatch, failover_wait_s=0) as (router, address),
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        async with FakeEngine(address, auto=False) as engine:
            started = generate(channel, spec([1]))
            await until(lambda: engine.live)
            await engine.step(2)
            assert len((await started.read()).token_ids) == 2
            queued = generate(channel, spec([2]))
            await until(lambda: len(engine.live) == 2)
        last = await started.read()
        assert last.end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert last.end.error.retryable
        assert await started.code() == grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await queued.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert router.admission.live_sequences == 0


async def test_a_client_that_never_reads_is_aborted_and_its_neighbour_is_not(monkeypatch):
    async with (
        running_router(monkeypatch, slow_reader_s=0.4) as (router, address),
        FakeEngine(address, auto=False) as engine,
        open_channel(address, secret=CLIENT_SECRET) as slow_channel,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        flood = 200_000
        next(iter(router.fleet)).model.max_model_len = 10_000_000
        slow = generate(slow_channel, spec([1], max_tokens=None))
        await until(lambda: engine.live)
        handle = next(iter(engine.live))
        quick = generate(channel, spec([2], max_tokens=40))
        await until(lambda: len(engine.live) == 2)
        quick_handle = next(h for h in engine.live if h != handle)
        for _ in range(30):
            output = common_pb2.StepOutput(handles=[handle], token_counts=[flood], token_ids=[999] * flood)
            await engine.send(step=output)
            if engine.aborted:
                break
            await asyncio.sleep(0.05)
        await until(lambda: engine.aborted == [handle])
        await until(lambda: router.admission.live_sequences == 1)
        assert engine.live.keys() == {quick_handle}
        await engine.step(40)
        assert (await collect(quick))[0] == expected([2], max_tokens=40)
        await until(lambda: router.admission.live_sequences == 0)
        # Cut in the end: what waited is dropped, and the status says why to who reads on after all.
        await until(lambda: len(router.client_watch) == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(slow)
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_SLOW_READER


async def test_who_comes_back_to_read_learns_that_it_was_too_slow(monkeypatch):
    async with (
        running_router(monkeypatch, slow_reader_s=0.5) as (router, address),
        FakeEngine(address, auto=False) as engine,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        next(iter(router.fleet)).model.max_model_len = 10_000_000
        slow = generate(channel, spec([1], max_tokens=None))
        await until(lambda: engine.live)
        handle = next(iter(engine.live))
        sent = 0
        while not engine.aborted:
            output = common_pb2.StepOutput(
                handles=[handle], token_counts=[100_000], token_ids=[999] * 100_000
            )
            await engine.send(step=output)
            sent += 100_000
            await asyncio.sleep(0.05)
        tokens, end = await collect(slow)
        assert end.error.code == common_pb2.ERROR_CODE_SLOW_READER
        assert 0 < len(tokens) <= sent
        assert set(tokens) == {999}
        assert end.usage.completion_tokens == len(tokens)


@pytest.mark.parametrize(
    ("secret", "status"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("wrong", grpc.StatusCode.UNAUTHENTICATED),
        (ENGINE_SECRET, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_who_is_no_client_is_denied(monkeypatch, secret, status):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address),
        open_channel(address, secret=secret) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(generate(channel, spec([1])))
        assert caught.value.code() == status
        assert router.admission.live_sequences == 0


async def test_logprobs_pass_through_unchanged(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        FakeEngine(address, auto=False) as engine,
    ):
        channel = open_channel(address, secret=CLIENT_SECRET)
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(
            router_pb2.GenerateRequest(spec=spec([4], top_logprobs=2))
        )
        other = router_pb2_grpc.RouterServiceStub(channel).Generate(
            router_pb2.GenerateRequest(spec=spec([5]))
        )
        await until(lambda: len(engine.live) == 2)
        by_prompt = {sequence.token_ids[0]: handle for handle, sequence in engine.live.items()}
        columns = common_pb2.LogprobColumns(
            rows=[1],
            sampled=[-0.5, -1.5],
            top_counts=[2, 1],
            top_ids=[7, 8, 9],
            top_logprobs=[-0.1, -0.2, -0.3],
        )
        output = common_pb2.StepOutput(
            handles=[by_prompt[5], by_prompt[4]],
            token_counts=[1, 2],
            token_ids=[1, 2, 3],
            logprobs=columns,
            ends=[common_pb2.SequenceEnd(row=row, reason=common_pb2.FINISH_REASON_STOP) for row in (0, 1)],
        )
        await engine.send(step=output)
        answer = await call.read()
        assert list(answer.token_ids) == [2, 3]
        assert answer.end.reason == common_pb2.FINISH_REASON_STOP
        columns.rows[:] = [0]
        assert answer.logprobs == columns
        assert not (await other.read()).HasField("logprobs")
