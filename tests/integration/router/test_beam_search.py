"""Beam searches over real gRPC: router, servicer and a scripted engine."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary_testing.engine import Script, ScriptedCapacity, sampled_logprob
from tests.support.router_fakes import FakeEngine, FakeGateway, running_router, spec, until
from tests.support.specs import expected_tokens, sequence_spec

PROMPT = [5, 6, 7]
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def search_spec(width: int, results: int, *, penalty: float = 1.0, **options) -> common_pb2.SequenceSpec:
    made = sequence_spec(PROMPT, **options)
    made.beam_search.CopyFrom(common_pb2.BeamSearch(width=width, results=results, length_penalty=penalty))
    return made


async def test_a_search_is_answered_by_hypotheses_alone(start_fleet):
    fleet = await start_fleet(engines=1)
    tokens, end = await fleet.answer(search_spec(4, 3, top_logprobs=2, prompt_logprobs=0, max_tokens=6))
    assert tokens == []
    assert len(end.hypotheses) == 3
    assert [len(one.token_ids) for one in end.hypotheses] == [6] * 3
    wanted = sorted(
        (expected_tokens(PROMPT, 6, seed=seed) for seed in (7, 8, 9)),
        key=lambda ids: -sum(sampled_logprob(token, 3 + i) for i, token in enumerate(ids)),
    )
    assert [list(one.token_ids) for one in end.hypotheses] == wanted
    assert all(better.score >= worse.score for better, worse in pairwise(end.hypotheses))
    for one in end.hypotheses:
        assert one.score == pytest.approx(sum(one.logprobs.sampled) / 6)
        assert list(one.logprobs.top_counts) == [2] * 6
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (LENGTH, 3, 18)
    stops = search_spec(1, 1, penalty=0.0, max_tokens=9, stop_token_ids=[expected_tokens(PROMPT, 5)[-1]])
    _, end = await fleet.answer(stops)
    assert list(end.hypotheses[0].token_ids) == expected_tokens(PROMPT, 5)
    assert (end.reason, end.hypotheses[0].reason) == (STOP, STOP)
    assert end.hypotheses[0].stop_token_id == end.stop_token_id == stops.stopping.stop_token_ids[0]
    assert not end.hypotheses[0].HasField("logprobs")
    await fleet.idle()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"width": 0}, "use_beam_search"),
        ({"width": 9}, "use_beam_search"),
        ({"width": 2**31}, "use_beam_search"),
        ({"results": 0}, "use_beam_search"),
        ({"results": 5}, "use_beam_search"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"length_penalty": -11}, "length_penalty"),
    ],
)
async def test_bad_searches_are_refused(start_fleet, change, param):
    fleet = await start_fleet(engines=1)
    bad = search_spec(4, 4)
    for name, value in change.items():
        setattr(bad.beam_search, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.answer(bad)
    error = error_of(refused.value)
    assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, param)
    resumed = search_spec(4, 4, prompt_len=2)
    constrained = search_spec(4, 4)
    constrained.constraint.CopyFrom(common_pb2.Constraint(kind=2, source="a"))
    huge = search_spec(8, 8, top_logprobs=20, max_tokens=4000)
    for other, name in ((resumed, "prompt_len"), (constrained, "constraint"), (huge, "max_tokens")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.answer(other)
        assert error_of(refused.value).param == name
    await fleet.idle()


async def test_an_engine_that_shares_no_blocks_takes_no_search(start_fleet):
    fleet = await start_fleet(engines=1, contiguous_kv=True, enable_prefix_caching=False)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.answer(search_spec(2, 1))
    assert error_of(refused.value).code == common_pb2.ERROR_CODE_UNSUPPORTED
    await fleet.idle()


async def test_a_search_counts_as_its_beams(start_fleet):
    fleet = await start_fleet(
        engines=1,
        script=Script(capacity=ScriptedCapacity(max_running=4, max_waiting=2)),
        router={"lane_sequences": (0, 0, 0, 0)},
    )
    (engine,) = fleet.engines
    engine.faults.stalled = True
    running = asyncio.create_task(fleet.answer(search_spec(4, 1)))
    await until(lambda: fleet.router.admission.live_sequences == 4)
    (known,) = fleet.router.fleet
    assert known.placed_sequences == 4
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.answer(search_spec(3, 1))
    assert error_of(refused.value).code == common_pb2.ERROR_CODE_OVERLOADED
    small = asyncio.create_task(fleet.answer(search_spec(2, 1)))
    await until(lambda: engine.app.frontend.live_sequences == 2)
    report = engine.app.frontend.load()
    assert report.running + report.waiting == 6
    engine.faults.resume()
    assert (await running)[1].reason == (await small)[1].reason == LENGTH
    await fleet.idle()


async def test_an_engine_that_breaks_the_contract_of_searches_is_given_up(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 1)
        asked = spec([1, 2], max_tokens=4)
        asked.beam_search.CopyFrom(common_pb2.BeamSearch(width=2, results=1))
        await gateway.submit(1, asked)
        await until(lambda: bool(engine.submitted))
        handle = engine.submitted[0].handle
        found = common_pb2.Hypothesis(token_ids=[1] * 5, score=-1, reason=LENGTH)
        end = common_pb2.SequenceEnd(reason=LENGTH, hypotheses=[found])
        await engine.send(step=common_pb2.StepOutput(handles=[handle], token_counts=[0], ends=[end]))
        await gateway.ended(1)
        assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        await until(lambda: len(router.fleet) == 0)
        assert router.admission.live_sequences == 0
